import pytest
import torch
from leyline_kernels.layer_buffers import LayerBuffers, check_moves
from leyline_kernels.layout import MlaLayout

LAYOUT = MlaLayout(kv_lora_rank=40, qk_rope_head_dim=32)


def pool(num_layers=2, *, num_slots=8, dtype=torch.float32):
    return [torch.zeros(num_slots, 1, 72, dtype=dtype) for _ in range(num_layers)]


def test_every_buffers_address_is_written_down_in_order():
    buffers = pool(3)
    layers = LayerBuffers.of(buffers, LAYOUT)
    assert layers.addresses.dtype == torch.int64
    assert layers.addresses.tolist() == [buffer.data_ptr() for buffer in buffers]


def test_a_stacked_pool_is_the_list_of_its_layers():
    stacked = torch.zeros(3, 8, 1, 72)
    layers = LayerBuffers.of(stacked, LAYOUT)
    assert layers.addresses.tolist() == [stacked.data_ptr() + idx * 8 * 72 * 4 for idx in range(3)]
    layers.buffers[2][5] = 1
    assert stacked[2, 5].all()


@pytest.mark.parametrize(
    ("offset", "row_stride", "dtype", "alignment_bytes"),
    [
        pytest.param(0, 72, torch.float32, 16, id="whole_vectors"),
        pytest.param(0, 72, torch.bfloat16, 16, id="of_a_small_type"),
        pytest.param(0, 76, torch.bfloat16, 8, id="rows_apart"),
        pytest.param(4, 72, torch.bfloat16, 8, id="a_buffer_that_begins_off"),
        pytest.param(0, 73, torch.float32, 4, id="odd_float32"),
        pytest.param(1, 73, torch.bfloat16, 2, id="odd_bfloat16"),
    ],
)
def test_the_alignment_holds_for_every_row(offset, row_stride, dtype, alignment_bytes):
    memory = torch.zeros(1000, dtype=dtype)
    buffers = [torch.zeros(1000, dtype=dtype).as_strided((8, 1, 72), (row_stride, 72, 1))]
    buffers += [memory.as_strided((8, 1, 72), (row_stride, 72, 1), offset)]
    layers = LayerBuffers.of(buffers, LAYOUT)
    assert layers.row_alignment_bytes == alignment_bytes


TWICE = torch.zeros(8, 1, 72)
REFUSED = {
    "none": ([], "got none, expected one for each layer"),
    "other_layout": ([torch.zeros(8, 1, 73)], "rows: got shape"),
    "other_slots": ([torch.zeros(8, 1, 72), torch.zeros(9, 1, 72)], r"buffers\[1\]: .* shape \(9, 1, 72\)"),
    "other_dtype": ([torch.zeros(8, 1, 72), torch.zeros(8, 1, 72).half()], r"buffers\[1\]: got torch.float16"),
    "other_device": ([torch.zeros(8, 1, 72), torch.zeros(8, 1, 72, device="meta")], r"buffers\[1\]: .* on meta"),
    "columns_apart": ([torch.zeros(8, 1, 144)[..., ::2]], r"buffers\[0\]: got strides \(144, 144, 2\)"),
    "rows_that_overlap": ([torch.zeros(600).as_strided((8, 1, 72), (71, 72, 1))], r"buffers\[0\]: got strides \(71"),
    "rows_of_other_strides": (
        [torch.zeros(8, 1, 72), torch.zeros(8, 1, 80)[..., :72]],
        r"buffers\[1\]: got strides \(80, 80, 1\), .* \(72\)",
    ),
    "one_twice": ([TWICE, TWICE], "one occurs twice"),
}


@pytest.mark.parametrize(("buffers", "wanted"), REFUSED.values(), ids=REFUSED)
def test_buffers_that_are_not_alike_are_refused(buffers, wanted):
    with pytest.raises(ValueError, match=wanted):
        LayerBuffers.of(buffers, LAYOUT)


ALLOWED = {
    "none": ([], []),
    "apart": ([1, 2], [3, 4]),
    "each_onto_itself": ([4, 2, 7], [4, 2, 7]),
    "one_read_twice": ([1, 1], [3, 4]),
}


@pytest.mark.parametrize(("src", "dst"), ALLOWED.values(), ids=ALLOWED)
@pytest.mark.parametrize("src_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_moves_that_depend_on_no_order_are_allowed(src, dst, src_dtype):
    check_moves(torch.tensor(src, dtype=src_dtype), torch.tensor(dst, dtype=torch.int64), num_slots=8)


FORBIDDEN = {
    "shifted": ([3, 4, 5], [4, 5, 6], ValueError, r"2 slots in common \(\[4, 5\]"),
    "swapped": ([3, 7], [7, 3], ValueError, "2 slots in common"),
    "written_twice": ([3, 4], [5, 5], ValueError, "dst_slots: 1 of 2 occur more than once"),
    "twice_onto_itself": ([3, 3], [3, 3], ValueError, "dst_slots: 1 of 2 occur more than once"),
    "src_beyond": ([8], [1], IndexError, "src_slots: got 8 to 8, expected slots of 0 to 7"),
    "dst_negative": ([1], [-1], IndexError, "dst_slots: got -1 to -1"),
}


@pytest.mark.parametrize(("src", "dst", "error", "wanted"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_moves_that_depend_on_an_order_or_leave_the_pool_are_refused(src, dst, error, wanted):
    with pytest.raises(error, match=wanted):
        check_moves(torch.tensor(src), torch.tensor(dst), num_slots=8)
