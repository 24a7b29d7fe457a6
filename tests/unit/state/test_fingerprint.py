"""The digest of a tensor does not depend on how it is cut, and sees every bit and its place."""

import pytest
import torch

import orlop.state.fingerprint as module
from orlop.state.fingerprint import tensor_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64]


def values(dtype, shape=(7, 5)):
    raw = torch.randint(
        0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    if dtype == torch.bool:
        return raw[..., 0] > 127
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [2**20, 4])
def test_any_cut_gives_the_same_sum(monkeypatch, dtype, chunk):
    whole = values(dtype)
    untouched = whole.clone()
    expected = tensor_sum(whole, (0, 0), (7, 5))
    assert torch.equal(whole.view(torch.uint8), untouched.view(torch.uint8))
    monkeypatch.setattr(module, "_CHUNK", chunk)
    for boxes in ([(0, 3, 0, 5), (3, 7, 0, 5)], [(0, 7, 0, 2), (0, 7, 2, 5)], [(0, 7, 0, 5), (7, 7, 0, 5)]):
        parts = [tensor_sum(whole[a:b, c:d], (a, c), (7, 5)) for a, b, c, d in boxes]
        assert sum(parts) % 2**64 == expected
    # A transposed view's elements have the same places.
    assert tensor_sum(whole.t().contiguous().t(), (0, 0), (7, 5)) == expected


def test_one_bit_or_two_swapped_values_change_the_sum():
    whole = values(torch.float32)
    expected = tensor_sum(whole, (0, 0), (7, 5))
    for bit in range(32):
        flipped = whole.clone()
        flipped.view(torch.int32)[3, 2] ^= 1 << bit if bit < 31 else -(2**31)
        assert tensor_sum(flipped, (0, 0), (7, 5)) != expected
    swapped = whole.clone()
    swapped[0, 0], swapped[6, 4] = whole[6, 4], whole[0, 0]
    assert tensor_sum(swapped, (0, 0), (7, 5)) != expected
    assert tensor_sum(torch.tensor(-0.0), (), ()) != tensor_sum(torch.tensor(0.0), (), ())


def test_zeros_are_not_nothing():
    assert tensor_sum(torch.zeros(3), (0,), (3,)) != tensor_sum(torch.zeros(4), (0,), (4,))
    assert tensor_sum(torch.zeros(0), (0,), (0,)) == 0


@pytest.mark.parametrize("chunk", [2**20, 2])
def test_conjugate_and_negative_views_have_the_sum_of_their_values(monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    values = torch.tensor([[1 + 2j, 3 - 1j, 0.5j], [-2 + 0j, 1j, 7 - 7j]])
    for view in (values.conj(), values.conj().imag, values.conj().t()):
        real = view.resolve_conj().resolve_neg().contiguous()
        assert not real.is_conj()
        assert not real.is_neg()
        assert tensor_sum(view, (0, 0), tuple(view.shape)) == tensor_sum(real, (0, 0), tuple(view.shape))
