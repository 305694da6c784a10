"""What scripted models do in each mini_nightmare task: an edit that fixes it, and one that overwrites the tests.

An edit names lines of the code as debug-gym's own data has it.
"""

from __future__ import annotations

from evals.solve_rate.environment import Call, ScriptedCalls

# First line, last line, new text: later lines first, so that the numbers stay those of the original.
_Edit = tuple[int, int, str]

_EDITS: dict[str, tuple[_Edit, ...]] = {
    "config": (
        (
            37,
            38,
            "    def set(self, name, value):\n        self._config[name] = value\n        self._cache.pop(name, None)",
        ),
        # One cache for each instance; set before anything that `__getattr__` would look up in it.
        (6, 6, "        self._cache = {}\n        self._config = config_dict or {}"),
    ),
    "counter": (
        (
            22,
            33,
            "        with self._lock:\n"
            "            self._count += 1\n"
            "            self._increment_history.append((threading.get_ident(), self._count - 1, self._count))\n"
            "            self._active_threads -= 1",
        ),
    ),
    "grader": ((35, 35, "            if len(grades) == len(self.class_data) and min(grades) >= threshold"),),
    "pandas_dataframe": ((15, 15, "    median = df['Fare'].median()"),),
    "patcher": (
        (
            31,
            31,
            '        if not 0 <= head <= tail:\n            return "SyntaxError: invalid syntax.", None, None\n'
            '        return "", head, tail',
        ),
    ),
    "purr": (
        (
            27,
            32,
            "        if self.hunger > 20:\n"
            "            result = self.intense_meow()\n"
            '            self.feed("meat")\n'
            "        elif self.hunger > 10:\n"
            "            result = self.meow()\n"
            '            self.feed("fish")',
        ),
    ),
    "scientific_calculator": (
        (
            20,
            23,
            '            numbers = input_text.split(self.action_str)[1].split("```")[0].strip()\n'
            "            number_1, number_2 = numbers.split()\n"
            "        except (IndexError, ValueError):\n"
            '            return "SyntaxError: invalid syntax."',
        ),
    ),
    "shopping_cart": (
        (
            24,
            24,
            "        # Half a cent is rounded up; the small number makes up for binary fractions.\n"
            "        return int(self.total * 100 + 0.5 + 1e-6) / 100",
        ),
        (15, 15, "        self.total += price * quantity * (100 - self.discounts.get(item, 0)) / 100"),
    ),
    "sum_tree": (
        (
            25,
            31,
            "def print_tree(node, level=0, seen=None):\n"
            "    seen = seen or set()\n"
            "    if not node or node in seen:\n"
            "        return []\n"
            "    seen.add(node)\n"
            '    output = [f"Value: {node.value}, Sum: {node.sum}"]\n'
            "    output += print_tree(node.left, level + 1, seen)\n"
            "    return output + print_tree(node.right, level + 1, seen)",
        ),
        (
            14,
            22,
            "def build_sum_tree(root, seen=None):\n"
            "    seen = seen or set()\n"
            "    if not root or root in seen:\n"
            "        return 0\n"
            "    seen.add(root)\n"
            "    root.sum = root.value + build_sum_tree(root.left, seen) + build_sum_tree(root.right, seen)\n"
            "    return root.sum",
        ),
    ),
    "tomorrow_date": (
        (
            25,
            26,
            "            elif day == 29:\n                return datetime(year, 3, 1).date()\n"
            "            else:\n                return datetime(year, month, day + 1).date()",
        ),
    ),
}

# As many tests as any task has.
_FAKE_TESTS = "".join(f"def test_{letter}(): pass\\n" for letter in "abcde")


def scripted_calls(task: str) -> ScriptedCalls:
    """Return the calls of scripted models in a task."""
    code = f"{task}_code.py"
    look: Call = ("view", {"path": code})
    break_at: Call = ("pdb", {"command": f"b {code}:1"})
    edits: list[Call] = [
        ("edit", {"path": code, "start": start, "end": end, "new_code": text}) for start, end, text in _EDITS[task]
    ]
    overwrite: Call = ("bash", {"command": f"printf '{_FAKE_TESTS}' > test.py"})
    return ScriptedCalls(
        solution=(
            look,
            ("bash", {"command": "ls; git status --short"}),
            ("eval", {}),
            break_at,
            *edits,
            ("submit", {}),
        ),
        give_up=(("submit", {"message": "I give up."}),),
        filler=("bash", {"command": "wc -l *.py"}),
        cheat=(look, overwrite, ("eval", {}), ("submit", {})),
    )
