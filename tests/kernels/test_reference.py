import pytest
import torch
from leyline_kernels.layout import KeyLayout, MlaLayout
from leyline_kernels.reference import copy_rotate_, rotate_, rotate_rows
from leyline_kernels.rope_tables import delta_table, move_table

LAYOUTS = {
    "mla": MlaLayout(kv_lora_rank=40, qk_rope_head_dim=64),
    "heads": KeyLayout(num_kv_heads=3, head_dim=64, rotary_dim=64),
    # Part of a head is rotated, and 24 pairs are no power of two.
    "partial": KeyLayout(num_kv_heads=2, head_dim=80, rotary_dim=48),
}
# Rounding to a type moves a value by at most half an ulp, 2**-p of it for a mantissa of p bits, hidden one included.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

styles = pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", HALF_ULP, ids=["fp32", "bf16", "fp16"])


def random_rows(layout, num_rows, *, seed=0, dtype=torch.float32):
    return torch.randn(num_rows, *layout.row_shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rope_dim(layout):
    return layout.band.stop - layout.band.start


def moved(rows, layout, inv_freq, position_delta, is_neox_style):
    cos, sin = delta_table(inv_freq, position_delta)
    return rotate_rows(rows, layout=layout, cos=cos, sin=sin, is_neox_style=is_neox_style)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@styles
@layouts
@dtypes
@pytest.mark.parametrize("position_delta", [1, -1988, 60_000])
def test_a_moved_key_is_the_key_at_its_new_position(rope, make_inv_freq, layout, dtype, is_neox_style, position_delta):
    inv_freq = make_inv_freq(rope_dim(layout))
    positions = torch.tensor([2000, 2001, 30_000, 61_000], dtype=torch.float64)
    keys = random_rows(layout, 4).double()[..., layout.band]
    angles = (positions[:, None] * inv_freq.double())[:, None, :]
    stored = random_rows(layout, 4, seed=1, dtype=dtype)
    stored[..., layout.band] = rope.turn(keys, angles, is_neox_style).to(dtype)

    found = moved(stored, layout, inv_freq, position_delta, is_neox_style)[..., layout.band]
    new_angles = ((positions + position_delta)[:, None] * inv_freq.double())[:, None, :]
    # Rounded when it was stored and again now, each at most half an ulp of every value. A turn keeps lengths, so the
    # first error arrives as large as it was. In fp32 the maths adds the table's rounding and three operations.
    tolerance = 2 * HALF_ULP[dtype] + 5 * HALF_ULP[torch.float32]
    assert rope.relative_l2(found, rope.turn(keys, new_angles, is_neox_style)) < tolerance


def model_keys(keys, positions, inv_freq, is_neox_style):
    """Turn as a model's fp32 `cos_sin_cache` does: angle, cosine and product all in float32."""
    angles = positions.float()[:, None] * inv_freq.float()
    half = keys.shape[-1] // 2
    x, y = (keys[..., :half], keys[..., half:]) if is_neox_style else (keys[..., 0::2], keys[..., 1::2])
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1 if not is_neox_style else -2)
    return turned.flatten(-2)


def bound(position):
    """Relative L2 that moved fp32 keys may have against the model's own at `position`, over many rows.

    The model rounds the angle p * f of each pair to float32: an error of at most 2**-24 p f, 3.4e-8 p f in the worst
    root mean square over the digits of p f. A pair turned wrongly by e radians is off by e of its length. Over 32
    pairs of equal length with f_i = 10000 ** (-i / 32) the root mean square of f is 0.27, so one such rounding is
    0.92e-8 p, and two of them, at the old position and at the new one, 1.3e-8 p: within 2e-8 p. Below 500 positions
    1e-5 rules, which is for the roundings of the row itself (and, on a server, for another order of summation).

    A single row whose length lies mostly in its fast pairs, f near 1, can exceed 2e-8 p by the share it has there.
    """
    return max(1e-5, 2e-8 * position)


@styles
@pytest.mark.parametrize("old_position", [100, 5000, 60_000, 110_000])
@pytest.mark.parametrize("new_position", [10, 4000, 65_000, 118_000])
def test_moved_fp32_keys_are_within_the_bound_of_the_models_own_and_wrong_ones_far_beyond(
    make_inv_freq, is_neox_style, old_position, new_position
):
    layout, inv_freq, num_rows = LAYOUTS["mla"], make_inv_freq(64), 256
    rows = random_rows(layout, num_rows)
    keys = rows[..., layout.band].clone()
    offsets = torch.arange(num_rows)
    rows[..., layout.band] = model_keys(keys, old_position + offsets, inv_freq, is_neox_style)
    expected = model_keys(keys, new_position + offsets, inv_freq, is_neox_style)
    position_delta = new_position - old_position

    found = moved(rows, layout, inv_freq, position_delta, is_neox_style)[..., layout.band]
    # A model's key has the error of its own position: a move leftwards brings that of the larger one along.
    allowed = bound(max(old_position, new_position))
    assert all_rows_relative_l2(found, expected) < allowed

    wrong = moved(rows, layout, inv_freq, position_delta + 1, is_neox_style)[..., layout.band]
    # A delta wrong by one turns pair i wrongly by f_i: 0.27 in the root mean square, whatever the position.
    assert all_rows_relative_l2(wrong, expected) > 100 * allowed


@styles
@pytest.mark.parametrize("old_position", [100, 60_000, 110_000])
@pytest.mark.parametrize("new_position", [10, 65_000, 118_000])
def test_a_table_of_both_positions_leads_to_the_models_own_fp32_key(
    rope, make_inv_freq, is_neox_style, old_position, new_position
):
    layout, inv_freq, offsets = LAYOUTS["mla"], make_inv_freq(64), torch.arange(64)
    rows = random_rows(layout, 64)
    keys = rows[..., layout.band].clone()
    rows[..., layout.band] = model_keys(keys, old_position + offsets, inv_freq, is_neox_style)
    cos, sin = move_table(inv_freq, old_position + offsets, new_position - old_position)
    found = rotate_rows(rows, layout=layout, cos=cos, sin=sin, is_neox_style=is_neox_style)[..., layout.band]
    # Both sides have the angles' roundings in common, so each row is as near as fp32 maths done three times (the
    # model's table and turn, twice, and ours) allows, five half ulps each, at any position.
    expected = model_keys(keys, new_position + offsets, inv_freq, is_neox_style)
    assert rope.relative_l2(found, expected) < 15 * HALF_ULP[torch.float32]


def all_rows_relative_l2(found, expected):
    return float((found - expected).norm() / expected.norm())


@styles
@layouts
@dtypes
def test_a_turn_keeps_the_norm(make_inv_freq, layout, dtype, is_neox_style):
    rows = random_rows(layout, 50, dtype=dtype)
    found = moved(rows, layout, make_inv_freq(rope_dim(layout)), 12_345, is_neox_style)
    before, after = (tensor[..., layout.band].double().norm(dim=-1) for tensor in (rows, found))
    # Stored once more: half an ulp of each value, and in fp32 the table and the maths.
    assert float((after / before - 1).abs().max()) < HALF_ULP[dtype] + 5 * HALF_ULP[torch.float32]


@styles
@layouts
@dtypes
def test_there_and_back_returns(rope, make_inv_freq, layout, dtype, is_neox_style):
    rows, inv_freq = random_rows(layout, 20, dtype=dtype), make_inv_freq(rope_dim(layout))
    back = moved(moved(rows, layout, inv_freq, 777, is_neox_style), layout, inv_freq, -777, is_neox_style)
    # Stored twice, and in fp32 twice the maths.
    tolerance = 2 * HALF_ULP[dtype] + 10 * HALF_ULP[torch.float32]
    assert rope.relative_l2(back[..., layout.band], rows[..., layout.band]) < tolerance


@styles
@layouts
@dtypes
def test_two_moves_are_one_by_their_sum(rope, make_inv_freq, layout, dtype, is_neox_style):
    rows, inv_freq = random_rows(layout, 20, dtype=dtype), make_inv_freq(rope_dim(layout))
    twice = moved(moved(rows, layout, inv_freq, -1988, is_neox_style), layout, inv_freq, 431, is_neox_style)
    once = moved(rows, layout, inv_freq, -1988 + 431, is_neox_style)
    # Stored twice on one side, once on the other, and in fp32 three times the maths.
    tolerance = 3 * HALF_ULP[dtype] + 15 * HALF_ULP[torch.float32]
    assert rope.relative_l2(twice[..., layout.band], once[..., layout.band]) < tolerance


@styles
@layouts
@dtypes
def test_other_columns_and_the_rows_given_are_bit_equal(make_inv_freq, layout, dtype, is_neox_style):
    rows = random_rows(layout, 9, dtype=dtype)
    before = rows.clone()
    found = moved(rows, layout, make_inv_freq(rope_dim(layout)), 5, is_neox_style)
    assert torch.equal(bits(rows), bits(before))
    outside = torch.ones(layout.row_shape[1], dtype=torch.bool)
    outside[layout.band] = False
    assert torch.equal(bits(found[..., outside]), bits(before[..., outside]))
    assert not torch.equal(found[..., layout.band], before[..., layout.band])


@styles
@layouts
@dtypes
def test_a_delta_of_0_leaves_every_bit(make_inv_freq, layout, dtype, is_neox_style):
    rows = random_rows(layout, 9, dtype=dtype)
    # Signs of zeros, and values that a multiplication by 0 would spread to the other of the pair.
    rows[0] = -0.0
    rows[1] = torch.inf
    rows[2, :, 1::2] = 0.0
    assert torch.equal(bits(moved(rows, layout, make_inv_freq(rope_dim(layout)), 0, is_neox_style)), bits(rows))


@styles
@layouts
@dtypes
def test_a_row_with_a_delta_of_0_among_others_keeps_every_bit(make_inv_freq, layout, dtype, is_neox_style):
    rows = random_rows(layout, 4, dtype=dtype)
    rows[1] = -0.0
    rows[2] = torch.inf
    found = moved(rows, layout, make_inv_freq(rope_dim(layout)), torch.tensor([5, 0, 0, 5]), is_neox_style)
    assert torch.equal(bits(found[1:3]), bits(rows[1:3]))
    assert not torch.equal(found[[0, 3]], rows[[0, 3]])


@styles
def test_a_half_turn_negates_though_its_sine_is_0(is_neox_style):
    layout, half_turn = LAYOUTS["partial"], {"cos": -torch.ones(24), "sin": torch.zeros(24)}
    rows = random_rows(layout, 2)
    found = rotate_rows(rows, layout=layout, **half_turn, is_neox_style=is_neox_style)
    assert torch.equal(found[..., layout.band], -rows[..., layout.band])


@styles
def test_a_delta_for_each_row_turns_each_by_its_own(make_inv_freq, is_neox_style):
    layout = LAYOUTS["partial"]
    rows, inv_freq = random_rows(layout, 3), make_inv_freq(48)
    deltas = [4, 0, -900]
    found = moved(rows, layout, inv_freq, torch.tensor(deltas), is_neox_style)
    for row, position_delta in enumerate(deltas):
        single = moved(rows[row : row + 1], layout, inv_freq, position_delta, is_neox_style)
        assert torch.equal(found[row], single[0])


def test_pairing_decides_which_columns_turn_together():
    layout = KeyLayout(num_kv_heads=1, head_dim=4, rotary_dim=4)
    rows = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.zeros(2), torch.ones(2)  # a quarter turn: (x, y) becomes (-y, x)
    neox = rotate_rows(rows, layout=layout, cos=cos, sin=sin, is_neox_style=True)
    assert neox.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    interleaved = rotate_rows(rows, layout=layout, cos=cos, sin=sin, is_neox_style=False)
    assert interleaved.tolist() == [[[-2.0, 1.0, -4.0, 3.0]]]


SLOTS = {
    # Nothing to do, the smallest copy, and slots in no order whose rows must not be mistaken for neighbours.
    "none": ([], []),
    "one": ([5], [9]),
    "scattered": ([11, 2, 7, 3], [1, 14, 0, 8]),
    "in_place": ([4, 6, 5], [4, 6, 5]),
    # A shift by one and a swap: written row by row, the later rows would read what was just written.
    "shifted": ([3, 4, 5, 6], [4, 5, 6, 7]),
    "swapped": ([3, 9], [9, 3]),
}


@styles
@layouts
@dtypes
@pytest.mark.parametrize(("src", "dst"), SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_are_copied_turned_and_no_other_slot_is_read_or_written(
    layout, dtype, is_neox_style, src, dst, slot_dtype
):
    buffer = random_rows(layout, 16, dtype=dtype)
    untouched = [slot for slot in range(16) if slot not in src and slot not in dst]
    buffer[untouched] = torch.nan
    cos, sin = delta_table(torch.linspace(1, 0.01, rope_dim(layout) // 2), -1988)
    options = {"layout": layout, "cos": cos, "sin": sin, "is_neox_style": is_neox_style}
    expected = buffer.clone()
    expected[dst] = rotate_rows(buffer[src], **options)
    copy_rotate_(buffer, torch.tensor(src, dtype=slot_dtype), torch.tensor(dst, dtype=slot_dtype), **options)
    assert torch.equal(bits(buffer), bits(expected))
    assert not buffer[dst].isnan().any()


@styles
@layouts
@dtypes
@pytest.mark.parametrize("slots", [[], [5], [11, 2, 7, 3]], ids=["none", "one", "scattered"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_turn_where_they_stand_and_no_other_slot_or_column_changes(
    layout, dtype, is_neox_style, slots, slot_dtype
):
    buffer = random_rows(layout, 16, dtype=dtype)
    buffer[[slot for slot in range(16) if slot not in slots]] = torch.nan
    cos, sin = delta_table(torch.linspace(1, 0.01, rope_dim(layout) // 2), -1988)
    options = {"layout": layout, "cos": cos, "sin": sin, "is_neox_style": is_neox_style}
    expected = buffer.clone()
    expected[slots] = rotate_rows(buffer[slots], **options)
    rotate_(buffer, torch.tensor(slots, dtype=slot_dtype), **options)
    assert torch.equal(bits(buffer), bits(expected))


@styles
@layouts
@dtypes
def test_a_turn_in_place_gives_the_bits_of_any_copy(make_inv_freq, layout, dtype, is_neox_style):
    # 301 rows, turned in one piece or copied in pieces, so that a key lies in other lanes of the processor each time.
    inv_freq, num_rows = make_inv_freq(rope_dim(layout)), 301
    rows = random_rows(layout, num_rows, dtype=dtype)
    cos, sin = move_table(inv_freq, torch.arange(40_000, 40_000 + num_rows), -1988)
    options = {"layout": layout, "is_neox_style": is_neox_style}
    in_place = rows.clone()
    rotate_(in_place, torch.arange(num_rows), cos=cos, sin=sin, **options)

    onto_itself = rows.clone()
    copy_rotate_(onto_itself, torch.arange(num_rows), torch.arange(num_rows), cos=cos, sin=sin, **options)
    assert torch.equal(bits(in_place), bits(onto_itself))
    elsewhere = torch.cat((torch.zeros_like(rows), rows))
    for start, end in ((0, 1), (1, 4), (4, num_rows)):
        src = torch.arange(num_rows + start, num_rows + end)
        copy_rotate_(elsewhere, src, src - num_rows, cos=cos[start:end], sin=sin[start:end], **options)
    assert torch.equal(bits(in_place), bits(elsewhere[:num_rows]))


def table(num_pairs=32):
    return {"cos": torch.ones(num_pairs), "sin": torch.zeros(num_pairs)}


@pytest.mark.parametrize(
    ("src", "dst", "changed", "error", "wanted"),
    [
        pytest.param([1, 2], [3], {}, ValueError, "got 2 src_slots for 1 dst_slots", id="lengths"),
        pytest.param([1.0], [3], {}, ValueError, "src_slots: got torch.float32", id="float_slots"),
        pytest.param([1], [[3]], {}, ValueError, r"dst_slots: .* of shape \(1, 1\)", id="slot_matrix"),
        pytest.param([99], [3], {}, IndexError, "out of range", id="src_beyond"),
        pytest.param([-1], [3], {}, IndexError, "out of range", id="src_negative"),
        pytest.param(
            [1, 2], [3, 16], {}, IndexError, "dst_slots: got 3 to 16, expected slots of 0 to 15", id="dst_beyond"
        ),
        pytest.param([1, 2], [3, -1], {}, IndexError, "dst_slots: got -1 to 3", id="dst_negative"),
        pytest.param(
            [1], [3], {"cos": torch.ones(16)}, ValueError, r"cos: .* shape \(16,\), expected", id="table_width"
        ),
        pytest.param([1], [3], {"sin": torch.zeros(2, 32)}, ValueError, r"sin: .* shape \(2, 32\)", id="table_rows"),
        pytest.param(
            [1], [3], {"cos": torch.ones(32).double()}, ValueError, "cos: got torch.float64", id="table_dtype"
        ),
        pytest.param([1], [3], {"layout": MlaLayout(8, 64)}, ValueError, "rows: got shape", id="layout"),
    ],
)
def test_a_refused_copy_leaves_the_buffer_as_it_was(src, dst, changed, error, wanted):
    layout = LAYOUTS["mla"]
    buffer = random_rows(layout, 16)
    before = buffer.clone()
    options = {"layout": layout, **table(), "is_neox_style": False, **changed}
    with pytest.raises(error, match=wanted):
        copy_rotate_(buffer, torch.tensor(src), torch.tensor(dst), **options)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(
    ("slots", "changed", "error", "wanted"),
    [
        pytest.param([1.0], {}, ValueError, "slots: got torch.float32", id="float_slots"),
        pytest.param([[3]], {}, ValueError, r"slots: .* of shape \(1, 1\)", id="slot_matrix"),
        pytest.param([3, 16], {}, IndexError, "out of range", id="beyond"),
        pytest.param([3, -1], {}, IndexError, "out of range", id="negative"),
        pytest.param([3], {"cos": torch.zeros(16)}, ValueError, r"cos: .* shape \(16,\), expected", id="table_width"),
        pytest.param([3], {"sin": torch.ones(2, 32)}, ValueError, r"sin: .* shape \(2, 32\)", id="table_rows"),
        pytest.param([3], {"layout": MlaLayout(8, 64)}, ValueError, "rows: got shape", id="layout"),
    ],
)
def test_a_refused_turn_leaves_the_buffer_as_it_was(slots, changed, error, wanted):
    buffer = random_rows(LAYOUTS["mla"], 16)
    before = buffer.clone()
    # A quarter turn, which shows wherever it was made.
    options = {"layout": LAYOUTS["mla"], "cos": torch.zeros(32), "sin": torch.ones(32), "is_neox_style": False}
    with pytest.raises(error, match=wanted):
        rotate_(buffer, torch.tensor(slots), **{**options, **changed})
    assert torch.equal(buffer, before)
