"""What a run is: tasks × arms × seeds, a model, a server, and where it ends. Read from YAML; knows no code of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from evals.mini_tasks import KINDS, LENGTHS, NUM_SEEDS
from evals.mini_tasks.catalogue import Kind, Length, Split
from evals.solve_rate.rows import AgentName, Execution, SolveRateError

CONFIGS = Path(__file__).with_name("configs")

ScriptName = Literal["solver", "failing", "erring", "cheating", "late_reader"]
EXECUTIONS: tuple[Execution, ...] = ("none", "reprefill", "splice", "forget")

_NAME = "[A-Za-z0-9._-]+"
"""Of runs and arms, which name files and go into headers."""

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Item = TypeVar("Item")


def _once(items: tuple[Item, ...]) -> tuple[Item, ...]:
    if len(set(items)) < len(items):
        raise ValueError("one is given twice")
    return items


Some = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_once)]
"""One or more, each once."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MiniNightmare(_Part):
    """debug-gym's ten mini_nightmare tasks, in debug-gym itself."""

    type: Literal["mini_nightmare"]
    tasks: Literal["all", "paper"] | Some[str] = "all"
    """All ten, the paper's eight, or some by name."""
    folder: Path | None = None
    """The tasks' data; by default `$LEYLINE_MINI_NIGHTMARE`, else what debug-gym downloads."""
    network: bool = False
    """Whether `pandas_dataframe`, which downloads a file, can run; it is skipped otherwise. Its commands have a network
    then."""
    repeats: dict[str, Positive] = {"counter": 3}
    """Episodes for each seed, by task; 1 where none is given. `counter` is a race, so one episode says little."""
    sandbox: Literal["auto", "require", "off"] = "auto"
    """Whether commands run in bubblewrap, without network: where it works, always, never."""
    tool_s: Seconds = 30
    """Time limit of one command."""


class MiniTasks(_Part):
    """Generated tasks; the seed of an episode is the task's."""

    type: Literal["mini_tasks"]
    kinds: Some[Kind] = KINDS
    lengths: Some[Length] = LENGTHS
    split: Split = "test"


class Model(_Part):
    """Who acts: a served model, a script, or what a model said in an earlier run."""

    name: str | None = None
    """As the server calls it; by default the first that it lists."""
    scripted: ScriptName | None = None
    """Which script answers. Each prompt is sent all the same, and one token generated."""
    recorded: Path | None = None
    """Folder of an earlier run whose answers are given again, by task, seed and repeat, those of the same arm if it
    was there. As with a script each prompt is sent."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """By default the server's, for SGLang what the model's authors recommend. With 0 the seeds of a mini_nightmare task
    are one episode over and over."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Positive = 2048
    """Of one answer."""
    extra_body: dict[str, Any] = {}
    """More fields of each chat request, such as `chat_template_kwargs`."""

    @model_validator(mode="after")
    def _one_actor(self) -> Model:
        if self.scripted is not None and self.recorded is not None:
            raise ValueError("scripted and recorded exclude each other")
        return self


class Serve(_Part):
    """An SGLang to start with the plugin, on this machine."""

    model: str | None = None
    """A folder or a name that SGLang can load; by default the random test model."""
    device: Literal["cpu", "cuda"] = "cpu"
    args: tuple[str, ...] = ()
    """More of `sglang.launch_server`'s arguments."""
    ready_s: Seconds = 180
    """How long it may take until it answers."""


def _without_v1(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("expected an address such as http://127.0.0.1:30000")
    return url.rstrip("/").removesuffix("/v1")


class Server(_Part):
    """Where chat requests go: to a running server, or to one that the run starts."""

    url: Annotated[str, AfterValidator(_without_v1)] | None = None
    """With `/v1` or without."""
    serve: Serve | None = None
    cache_salt: bool = True
    """Give each episode a `cache_salt` of its own, so that none profits from what another has cached. Off for servers
    that do not know the field."""

    @model_validator(mode="after")
    def _one_server(self) -> Server:
        if self.url is not None and self.serve is not None:
            raise ValueError("url and serve exclude each other")
        return self


class ArmPolicy(_Part):
    """A policy, possibly with another age."""

    policy: str
    """A shipped policy's name, or a path."""
    turns: Annotated[int, Field(ge=0)] | None = None
    """`older_than` in turns, as `Policy.with_turns`."""
    name: str | None = None
    """As arms are called; by default the policy's name, with `turns` where they are given."""

    @property
    def label(self) -> str:
        """Return the name."""
        stem = Path(self.policy).stem
        return self.name or (stem if self.turns is None else f"{stem}_{self.turns}")


class Limits(_Part):
    """Where an episode ends, and where a run does."""

    max_turns: Positive = 50
    """Model calls of an episode."""
    episode_s: Seconds = 1800
    total_s: Seconds | None = None
    """No episode starts after it, and those that run are broken off and not counted. Of one invocation."""
    total_tokens: Positive | None = None
    """Prompt and completion tokens of the whole run; once they are spent no episode starts, and those that run end."""


class Config(_Part):
    """A run."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    suite: Annotated[MiniNightmare | MiniTasks, Field(discriminator="type")]
    seeds: Some[Annotated[int, Field(ge=0)]] = (0,)
    policies: tuple[ArmPolicy | str, ...] = ("keep_last_tool_outputs",)
    executions: Some[Execution] = EXECUTIONS
    """`none` is the arm without a policy; the others are run for each policy."""
    agent: AgentName = "langgraph"
    model: Model = Model()
    server: Server = Server()
    limits: Limits = Limits()
    jobs: Positive = 1
    """Episodes at a time."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.agent == "debug_gym" and self.suite.type != "mini_nightmare":
            raise ValueError(f"agent: debug_gym acts in the suite mini_nightmare, got {self.suite.type}")
        if set(self.executions) != {"none"} and not self.policies:
            raise ValueError("policies: none given, and executions other than `none` need one")
        labels = [policy.label for policy in self.arm_policies]
        if odd := [label for label in labels if not re.fullmatch(_NAME, label)]:
            raise ValueError(f"policies: {odd[0]!r} is no name of an arm, expected letters, digits, '.', '_' and '-'")
        if len(set(labels)) < len(labels):
            raise ValueError(f"policies: two are called alike, got {', '.join(labels)}; give them a `name`")
        if self.suite.type == "mini_tasks":
            if self.model.scripted == "cheating":
                raise ValueError(
                    "model.scripted: cheating is for mini_nightmare; mini_tasks have no tests to overwrite"
                )
            if max(self.seeds) >= NUM_SEEDS:
                raise ValueError(f"seeds: got {max(self.seeds)}, and mini_tasks have seeds 0 to {NUM_SEEDS - 1}")
        return self

    @property
    def arm_policies(self) -> tuple[ArmPolicy, ...]:
        """Return the policies in their long form."""
        return tuple(ArmPolicy(policy=each) if isinstance(each, str) else each for each in self.policies)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for a run to be gone on with: all but where it runs, and until when."""
        whole = self.model_dump(mode="json")
        # A resumed run may have more time or another port; an episode's own limits belong to what is measured.
        whole["server"] = {"cache_salt": self.server.cache_salt}
        whole["limits"] = {"max_turns": self.limits.max_turns, "episode_s": self.limits.episode_s}
        whole["model"].pop("api_key_env")
        whole["suite"].pop("folder", None)
        del whole["jobs"]
        return whole


def load_config(source: Path | str) -> Config:
    """Read a config: a file, or the name of one that comes along.

    Raises:
        SolveRateError: it cannot be read, or says what no run can be.
    """
    file = Path(source)
    shipped = CONFIGS / f"{source}.yaml"
    if not file.is_file() and shipped.is_file():
        file = shipped
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise SolveRateError(f"{source}: cannot be read ({why}); expected a YAML file or one of {names}") from error
    except yaml.YAMLError as error:
        raise SolveRateError(f"{file}: no YAML: {error}") from error
    return parse_config(read, where=str(file))


def parse_config(read: Any, *, where: str) -> Config:
    """Return the config that a YAML document says.

    Raises:
        SolveRateError: it says what no run can be.
    """
    if not isinstance(read, dict):
        raise SolveRateError(f"{where}: got {type(read).__name__}, expected a mapping with version, name and suite")
    try:
        return Config.model_validate(read)
    except ValidationError as error:
        raise SolveRateError("\n".join([f"{where}: no config of a run", *_mistakes(error)])) from error


def _mistakes(error: ValidationError) -> Iterator[str]:
    for mistake in error.errors(include_url=False):
        # Parts with brackets are pydantic's names for the forms that a value may have.
        key = ".".join(str(part) for part in mistake["loc"] if "[" not in str(part))
        message = mistake["msg"].removeprefix("Value error, ")
        got = "" if isinstance(mistake["input"], dict) else f", got {mistake['input']!r}"
        yield f"  {key}: {message}{got}" if key else f"  {message}"
