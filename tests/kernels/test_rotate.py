"""The fused kernel against the reference: on a GPU (`-m gpu`), and without one under Triton's interpreter.

The interpreter must be chosen before triton is first imported and holds for the whole process, so the one test that
needs no GPU runs all others of this file in a process of its own.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout
from leyline_kernels.reference import copy_rotate_, rotate_
from leyline_kernels.rope_tables import delta_table, move_table

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"

LAYOUTS = {
    # The row of all models that this is measured on: one latent chunk, whole vectors.
    "deepseek": MlaLayout(kv_lora_rank=512, qk_rope_head_dim=64),
    # Narrower than a chunk, so masked; rows begin at multiples of 8 bytes in a 2-byte type.
    "narrow": MlaLayout(kv_lora_rank=40, qk_rope_head_dim=32),
    # More than one chunk, the last one masked.
    "wide": MlaLayout(kv_lora_rank=1100, qk_rope_head_dim=128),
    # Rows begin anywhere: nothing can be loaded as a vector.
    "odd": MlaLayout(kv_lora_rank=37, qk_rope_head_dim=32),
    # 24 pairs are no power of two.
    "24_pairs": MlaLayout(kv_lora_rank=16, qk_rope_head_dim=48),
}
# Rounding to a type moves a value by at most half an ulp, 2**-p of it for a mantissa of p bits, hidden one included.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NUM_LAYERS, NUM_SLOTS, GUARD_SLOTS = 2, 96, 2

styles = pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", HALF_ULP, ids=["fp32", "bf16", "fp16"])
gpu = pytest.mark.gpu
# The interpreter computes with numpy, which speaks up about infinities where a GPU does not.
quiet_numpy = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
gpu_only = pytest.mark.skipif(INTERPRETED, reason="streams, graphs and the allocator are those of a GPU")


@pytest.fixture
def rotate(monkeypatch):
    """The module under test."""
    if not (ON_GPU or INTERPRETED):
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 from the start of the process")
    if INTERPRETED:
        from triton.runtime import interpreter

        convert = interpreter._convert_float

        def rounded(values, src, dst, rounding_mode):
            # The interpreter of triton 3.7 cuts a float32 off where a GPU rounds it to the nearest bf16.
            if (src.name, dst.name) != ("fp32", "bf16"):
                return convert(values, src, dst, rounding_mode)
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", rounded)
    import leyline_kernels.rotate as module

    return module


class Pool:
    """Layers of poisoned memory: NaN everywhere, guard rows before and after, until rows are filled in."""

    def __init__(self, layout, dtype, *, num_layers=NUM_LAYERS, num_slots=NUM_SLOTS, room=0):
        self.layout = layout
        width = layout.row_shape[1]
        self.memory = torch.full((num_layers, num_slots + 2 * GUARD_SLOTS, 1, width + room), torch.nan, dtype=dtype)
        self.memory = self.memory.to(DEVICE)

    @property
    def buffers(self):
        return self.memory[:, GUARD_SLOTS:-GUARD_SLOTS, :, : self.layout.row_shape[1]]

    @property
    def layers(self):
        return LayerBuffers.of(self.buffers, self.layout)

    def fill_(self, slots, *, seed=0):
        rows = torch.randn(len(self.buffers), len(slots), *self.layout.row_shape, generator=seeded(seed))
        self.buffers[:, slots] = rows.to(self.buffers)
        return self

    def clone(self, device=None):
        twin = Pool.__new__(Pool)
        twin.layout, twin.memory = self.layout, self.memory.to(device or DEVICE, copy=True)
        return twin

    @property
    def bits(self):
        """All of the memory as it is now, guards included."""
        return bits(self.memory.cpu().clone())


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def vector(slots, dtype=torch.int64):
    return torch.tensor(slots, dtype=dtype, device=DEVICE)


def table(layout, num_rows, *, start=40_000, position_delta=-1988):
    inv_freq = torch.logspace(0, -4, layout.qk_rope_head_dim // 2)
    return move_table(inv_freq, torch.arange(start, start + num_rows), position_delta)


def on_device(tables):
    return {name: values.to(DEVICE) for name, values in zip(("cos", "sin"), tables, strict=True)}


def expected_copy(pool, src, dst, tables, is_neox_style):
    """What the reference makes of it, on the CPU, layer by layer."""
    twin = pool.clone("cpu")
    cos, sin = tables
    for buffer in twin.buffers:
        copy_rotate_(
            buffer,
            torch.tensor(src, dtype=torch.int64),
            torch.tensor(dst, dtype=torch.int64),
            layout=pool.layout,
            cos=cos,
            sin=sin,
            is_neox_style=is_neox_style,
        )
    return twin.bits


def expected_turn(pool, slots, tables, is_neox_style):
    twin = pool.clone("cpu")
    cos, sin = tables
    for buffer in twin.buffers:
        slot_vector = torch.tensor(slots, dtype=torch.int64)
        rotate_(buffer, slot_vector, layout=pool.layout, cos=cos, sin=sin, is_neox_style=is_neox_style)
    return twin.bits


SHUFFLED = torch.randperm(NUM_SLOTS, generator=seeded(5)).tolist()
# More rows than a program copies, the last program's not all there; few, since the interpreter takes its time.
SCATTERED = (SHUFFLED[:5], SHUFFLED[17:22])
# Likewise for a turn.
MANY = SHUFFLED[:17]


def assert_copied_as_the_reference_does(rotate, pool, src, dst, tables, is_neox_style, slot_dtype=torch.int64):
    expected = expected_copy(pool, src, dst, tables, is_neox_style)
    slots = {"src_slots": vector(src, slot_dtype), "dst_slots": vector(dst, slot_dtype)}
    rotate.copy_rotate_(pool.layers, **slots, **on_device(tables), is_neox_style=is_neox_style)
    # Both do the same operations in float32, each rounded by itself: not one bit may differ.
    assert torch.equal(pool.bits, expected)
    assert not pool.buffers[:, dst].isnan().any()


@gpu
@styles
@layouts
@dtypes
def test_rows_of_every_layer_are_copied_as_the_reference_does_and_nothing_else_changes(
    rotate, layout, dtype, is_neox_style
):
    src, dst = SCATTERED
    pool = Pool(layout, dtype).fill_(src)
    assert_copied_as_the_reference_does(rotate, pool, src, dst, table(layout, len(src)), is_neox_style)


@gpu
@styles
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param([], [], id="none"),
        # To where a lane that has no row to copy points.
        pytest.param([5], [0], id="one"),
        pytest.param(list(range(40, 67)), list(range(3, 30)), id="run"),
        pytest.param(SHUFFLED[:7], SHUFFLED[:7], id="onto_itself"),
    ],
)
def test_any_number_of_rows_is_copied_from_anywhere(rotate, is_neox_style, src, dst):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16).fill_(src)
    assert_copied_as_the_reference_does(rotate, pool, src, dst, table(layout, len(src)), is_neox_style)


def assert_turned_as_the_reference_does(rotate, pool, slots, is_neox_style):
    layout = pool.layout
    # In the rows that turn, what is not the band is poisoned too: only the band may be read.
    pool.buffers[:, slots, :, : layout.kv_lora_rank] = torch.nan
    tables = table(layout, len(slots))
    expected = expected_turn(pool, slots, tables, is_neox_style)
    rotate.rotate_(pool.layers, vector(slots), **on_device(tables), is_neox_style=is_neox_style)
    assert torch.equal(pool.bits, expected)
    assert not pool.buffers[:, slots, :, layout.kv_lora_rank :].isnan().any()


@gpu
@styles
@layouts
@dtypes
def test_rows_of_every_layer_turn_as_the_reference_does_and_nothing_else_changes(rotate, layout, dtype, is_neox_style):
    slots = MANY
    assert_turned_as_the_reference_does(rotate, Pool(layout, dtype).fill_(slots), slots, is_neox_style)


@gpu
@styles
@pytest.mark.parametrize("slots", [[], [5], list(range(3, 60))], ids=["none", "one", "run"])
@pytest.mark.parametrize("layers_a_program", [1, 2, 4])
def test_any_number_of_rows_turns_anywhere_however_many_layers_a_program_does(
    rotate, monkeypatch, is_neox_style, slots, layers_a_program
):
    monkeypatch.setattr(rotate, "_TURN_LAYERS", layers_a_program)
    pool = Pool(LAYOUTS["narrow"], torch.bfloat16, num_layers=3).fill_(slots)
    assert_turned_as_the_reference_does(rotate, pool, slots, is_neox_style)


@gpu
@pytest.mark.parametrize("half", [32, 24])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_the_table_of_a_run_is_that_of_its_positions(rotate, half, num_rows):
    inv_freq = (10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)).to(DEVICE)
    positions = torch.arange(50_000, 50_000 + num_rows, device=DEVICE)
    found = rotate.run_table(inv_freq, num_rows, old_start=50_000, position_delta=-1_988)
    for table, expected in zip(found, move_table(inv_freq, positions, -1_988), strict=True):
        # Cosines of float64 may differ in the last bit, which is seldom one of float32.
        assert torch.allclose(table, expected, rtol=0, atol=6e-8)
        assert (table != expected).float().mean() < 0.01 if num_rows else len(table) == 0


@gpu
@styles
def test_slots_may_be_int32(rotate, is_neox_style):
    layout, (src, dst) = LAYOUTS["narrow"], SCATTERED
    pool, tables = Pool(layout, torch.bfloat16).fill_(src), table(layout, len(src))
    assert_copied_as_the_reference_does(rotate, pool, src, dst, tables, is_neox_style, torch.int32)


@gpu
@styles
def test_one_table_for_all_rows_is_that_table_for_each(rotate, is_neox_style):
    layout, (src, dst) = LAYOUTS["narrow"], SCATTERED
    pool = Pool(layout, torch.float16).fill_(src)
    tables = delta_table(torch.logspace(0, -4, layout.qk_rope_head_dim // 2), 77)
    assert_copied_as_the_reference_does(rotate, pool, src, dst, tables, is_neox_style)


@gpu
@styles
@dtypes
def test_rows_may_have_room_between_them(rotate, dtype, is_neox_style):
    layout, (src, dst) = LAYOUTS["narrow"], SCATTERED
    pool = Pool(layout, dtype, room=5).fill_(src)
    assert_copied_as_the_reference_does(rotate, pool, src, dst, table(layout, len(src)), is_neox_style)


@gpu
@styles
@dtypes
def test_there_and_back_returns(rotate, rope, dtype, is_neox_style):
    layout, slots = LAYOUTS["deepseek"], MANY
    pool = Pool(layout, dtype).fill_(slots)
    before = pool.buffers[:, slots].cpu()
    there = table(layout, len(slots), start=40_000, position_delta=777)
    back = table(layout, len(slots), start=40_777, position_delta=-777)
    for tables in (there, back):
        rotate.rotate_(pool.layers, vector(slots), **on_device(tables), is_neox_style=is_neox_style)
    after = pool.buffers[:, slots].cpu()
    # Stored twice, and in fp32 twice the maths: five half ulps each, of the table and of three operations.
    tolerance = 2 * HALF_ULP[dtype] + 10 * HALF_ULP[torch.float32]
    band = layout.band
    assert rope.relative_l2(after[..., band], before[..., band]) < tolerance
    assert torch.equal(bits(after[..., : band.start]), bits(before[..., : band.start]))


@gpu
@styles
@dtypes
def test_two_moves_are_one_by_their_sum(rotate, rope, dtype, is_neox_style):
    layout, (src, dst) = LAYOUTS["deepseek"], SCATTERED
    pool = Pool(layout, dtype).fill_(src)
    options = {"is_neox_style": is_neox_style}
    first = table(layout, len(src), start=40_000, position_delta=-1988)
    second = table(layout, len(src), start=40_000 - 1988, position_delta=431)
    both = table(layout, len(src), start=40_000, position_delta=-1988 + 431)
    rotate.copy_rotate_(pool.layers, vector(src), vector(dst), **on_device(first), **options)
    rotate.rotate_(pool.layers, vector(dst), **on_device(second), **options)
    rotate.rotate_(pool.layers, vector(src), **on_device(both), **options)
    # Stored twice on one side, once on the other, and in fp32 three times the maths.
    tolerance = 3 * HALF_ULP[dtype] + 15 * HALF_ULP[torch.float32]
    twice, once = (pool.buffers[:, slots].cpu()[..., layout.band] for slots in (dst, src))
    assert rope.relative_l2(twice, once) < tolerance


@gpu
@styles
@dtypes
@quiet_numpy
def test_a_row_with_a_delta_of_0_among_others_keeps_every_bit(rotate, dtype, is_neox_style):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, dtype).fill_([0, 3])
    # The sign of a zero, and values that a multiplication by 0 would spread to the other of the pair.
    pool.buffers[:, 1] = -0.0
    pool.buffers[:, 2] = torch.inf
    before = pool.clone()
    tables = delta_table(torch.logspace(0, -1, layout.qk_rope_head_dim // 2), torch.tensor([5, 0, 0, 5]))
    rotate.rotate_(pool.layers, vector([0, 1, 2, 3]), **on_device(tables), is_neox_style=is_neox_style)
    assert torch.equal(bits(pool.buffers[:, 1:3].cpu()), bits(before.buffers[:, 1:3].cpu()))
    assert not torch.equal(pool.buffers[:, [0, 3]], before.buffers[:, [0, 3]])


@gpu
@styles
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_slots_beyond_2_to_the_31_elements_are_reached(rotate, is_neox_style, slot_dtype):
    layout = LAYOUTS["narrow"]
    edge = 2**31 // layout.row_shape[1]
    # 4.3 GB, of which on a CPU only the pages take memory that are touched.
    buffer = torch.empty(edge + 50, *layout.row_shape, dtype=torch.bfloat16, device=DEVICE)
    src, dst = [edge + 40, 3, edge + 1], [4, edge + 30, edge + 45]
    buffer[src] = torch.randn(3, *layout.row_shape, generator=seeded(1)).to(buffer)
    small = buffer[src].cpu()
    tables = table(layout, 3)
    slots = torch.arange(3)
    rotate_(small, slots, layout=layout, cos=tables[0], sin=tables[1], is_neox_style=is_neox_style)
    layers = LayerBuffers.of([buffer], layout)
    options = {**on_device(tables), "is_neox_style": is_neox_style}
    rotate.copy_rotate_(layers, vector(src, slot_dtype), vector(dst, slot_dtype), **options)
    assert torch.equal(bits(buffer[dst].cpu()), bits(small))
    rotate.rotate_(layers, vector(src, slot_dtype), **options)
    assert torch.equal(bits(buffer[src].cpu()), bits(small))


REFUSED = {
    "lengths": ({"dst_slots": [3]}, "got 2 src_slots for 1 dst_slots"),
    "float_slots": ({"src_slots": [1.0, 2.0]}, "src_slots: got torch.float32"),
    "table_width": ({"cos": torch.ones(8)}, r"cos: .* shape \(8,\), expected"),
    "table_rows": ({"sin": torch.ones(3, 16)}, r"sin: .* shape \(3, 16\)"),
    "table_dtype": ({"cos": torch.ones(16).double()}, "cos: got torch.float64"),
    "table_columns": ({"cos": torch.ones(16, 2).T}, r"cos: got strides \(1, 2\)"),
}


@gpu
@pytest.mark.parametrize(("changed", "wanted"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_the_pool_left_as_it_was(rotate, changed, wanted):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16).fill_([1, 2])
    before = pool.bits
    arguments = {"src_slots": [1, 2], "dst_slots": [3, 4], "cos": torch.zeros(16), "sin": torch.ones(16), **changed}
    arguments = {name: torch.as_tensor(value).to(DEVICE) for name, value in arguments.items()}
    with pytest.raises(ValueError, match=wanted):
        rotate.copy_rotate_(pool.layers, **arguments, is_neox_style=False)
    assert torch.equal(pool.bits, before)


@gpu
def test_slots_that_are_not_adjacent_are_refused(rotate):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16)
    options = {"cos": torch.zeros(16, device=DEVICE), "sin": torch.ones(16, device=DEVICE), "is_neox_style": False}
    with pytest.raises(ValueError, match=r"slots: .* strides \(2,\)"):
        rotate.rotate_(pool.layers, vector([1, 2, 3, 4])[::2], **options)


@gpu
@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        pytest.param([3, 4, 5], [4, 5, 6], ValueError, id="shifted"),
        pytest.param([3, 9], [9, 3], ValueError, id="swapped"),
        pytest.param([3, 4], [9, 9], ValueError, id="written_twice"),
        pytest.param([3], [NUM_SLOTS], IndexError, id="beyond"),
    ],
)
def test_checked_slots_that_depend_on_the_order_are_refused_and_the_pool_left_as_it_was(rotate, src, dst, error):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16).fill_(src)
    before = pool.bits
    options = {**on_device(table(layout, len(src))), "is_neox_style": False, "check_slots": True}
    with pytest.raises(error, match="slots"):
        rotate.copy_rotate_(pool.layers, vector(src), vector(dst), **options)
    assert torch.equal(pool.bits, before)


@gpu
def test_checked_slots_of_a_turn_may_not_occur_twice(rotate):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16).fill_([3])
    options = {**on_device(table(layout, 2)), "is_neox_style": False, "check_slots": True}
    with pytest.raises(ValueError, match="1 of 2 occur more than once"):
        rotate.rotate_(pool.layers, vector([3, 3]), **options)


@gpu
@gpu_only
def test_a_pool_on_the_cpu_is_refused(rotate):
    layout = LAYOUTS["narrow"]
    layers = LayerBuffers.of(torch.zeros(1, 8, *layout.row_shape), layout)
    with pytest.raises(ValueError, match="on cpu, expected CUDA"):
        rotate.rotate_(layers, torch.tensor([1]), cos=torch.ones(16), sin=torch.zeros(16), is_neox_style=False)


@gpu
@gpu_only
def test_slots_on_another_device_are_refused(rotate):
    layout = LAYOUTS["narrow"]
    pool = Pool(layout, torch.bfloat16)
    with pytest.raises(ValueError, match="slots: got a tensor on cpu, expected cuda:0"):
        rotate.rotate_(pool.layers, torch.tensor([1]), **on_device(table(layout, 1)), is_neox_style=False)


@gpu
@gpu_only
@styles
def test_a_captured_launch_does_at_each_replay_what_its_tensors_then_say(rotate, is_neox_style):
    layout = LAYOUTS["deepseek"]
    src, dst = SCATTERED
    pool = Pool(layout, torch.bfloat16).fill_(src)
    layers, options = pool.layers, {"is_neox_style": is_neox_style}
    slots = {"src_slots": vector(src), "dst_slots": vector(dst)}
    tables = on_device(table(layout, len(src)))
    rotate.copy_rotate_(layers, **slots, **tables, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate.copy_rotate_(layers, **slots, **tables, **options)
    for seed in (1, 2):
        pool.memory.fill_(torch.nan)
        moves = torch.randperm(NUM_SLOTS, generator=seeded(seed)).tolist()
        new_src, new_dst = moves[:5], moves[17:22]
        pool.fill_(new_src, seed=seed)
        new_tables = table(layout, len(src), position_delta=seed)
        expected = expected_copy(pool, new_src, new_dst, new_tables, is_neox_style)
        slots["src_slots"].copy_(vector(new_src))
        slots["dst_slots"].copy_(vector(new_dst))
        for name, values in on_device(new_tables).items():
            tables[name].copy_(values)
        graph.replay()
        assert torch.equal(pool.bits, expected)


@gpu
@gpu_only
def test_a_launch_allocates_nothing(rotate):
    layout = LAYOUTS["deepseek"]
    src, dst = SCATTERED
    layers = Pool(layout, torch.bfloat16).fill_(src).layers
    src_slots, dst_slots, tables = vector(src), vector(dst), on_device(table(layout, len(src)))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    rotate.copy_rotate_(layers, src_slots, dst_slots, **tables, is_neox_style=False)
    rotate.rotate_(layers, dst_slots, **tables, is_neox_style=False)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@gpu
@styles
@quiet_numpy
def test_a_warm_up_changes_no_bit(rotate, is_neox_style):
    pool = Pool(LAYOUTS["narrow"], torch.bfloat16).fill_(range(NUM_SLOTS))
    pool.buffers[:, 0] = torch.inf
    before = pool.bits
    rotate.warm_up(pool.layers, is_neox_style=is_neox_style)
    assert torch.equal(pool.bits, before)


@gpu
@gpu_only
@layouts
def test_after_a_warm_up_nothing_is_compiled(rotate, monkeypatch, layout):
    import triton

    compiled = []
    pool = Pool(layout, torch.bfloat16).fill_(range(NUM_SLOTS))
    layers = pool.layers
    rotate.warm_up(layers, is_neox_style=False)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *, key, **_: compiled.append(key))
    # One row, sixteen, and views into slot vectors that begin anywhere: what Triton would otherwise compile for.
    for num_rows in (1, 16, 17, 40):
        slots, tables = vector(list(range(NUM_SLOTS))), on_device(table(layout, num_rows))
        src, dst = slots[1 : 1 + num_rows], slots[50 : 50 + num_rows]
        rotate.copy_rotate_(layers, src, dst, **tables, is_neox_style=False)
        rotate.rotate_(layers, dst, **tables, is_neox_style=False)
    assert not compiled


@gpu
@gpu_only
def test_a_launch_is_on_the_current_stream(rotate):
    layout = LAYOUTS["deepseek"]
    src, dst = SCATTERED
    pool = Pool(layout, torch.bfloat16).fill_(src)
    tables = table(layout, len(src))
    expected = expected_copy(pool, src, dst, tables, False)
    slots, device_tables, layers = (vector(src), vector(dst)), on_device(tables), pool.layers
    saved, stream = pool.memory.clone(), torch.cuda.Stream()
    pool.memory.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Half a second in which a launch on any other stream would read zeros.
        torch.cuda._sleep(10**9)
        pool.memory.copy_(saved)
        rotate.copy_rotate_(layers, *slots, **device_tables, is_neox_style=False)
    stream.synchronize()
    assert torch.equal(pool.bits, expected)


def test_all_that_needs_no_gpu_passes_under_tritons_interpreter():
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        pytest.fail("triton is not installed, so the kernel is not tested: run `make env`")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    # With it SGLang's CPU stand-ins answer for a triton that is not installed.
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    command = [sys.executable, "-m", "pytest", str(Path(__file__)), "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "TRITON_INTERPRET=1 from the start" not in run.stdout
