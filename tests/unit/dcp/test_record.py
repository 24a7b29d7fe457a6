"""Records as torch writes them: written here and read by torch, written by torch and read here."""

import io
import zipfile

import pytest
import torch

from orlop.dcp.archive import Unusual, locate_tensor
from orlop.dcp.checksums import crc32
from orlop.dcp.dtypes import ITEM_BYTES, LEGACY_STORAGES
from orlop.dcp.record import frame_tensor
from orlop.errors import CheckpointCorrupt

SHAPES = [(), (0, 4), (2, 3), (5, 1, 2), (200, 300)]
DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]


def sample(name, shape):
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape), raw.numpy().tobytes()


def by_torch(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def reading(content):
    return lambda offset, count: content[offset : offset + count]


def located(content):
    return locate_tensor(reading(content), len(content), "leaf in file")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_tables_agree_with_torch():
    for name in DTYPES:
        assert getattr(torch, name).itemsize == ITEM_BYTES[name]
    for name, storage in LEGACY_STORAGES.items():
        assert getattr(torch, storage)(0).dtype == getattr(torch, name)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape_goes_both_ways(name):
    for shape in SHAPES:
        tensor, raw = sample(name, shape)
        theirs = by_torch(tensor)
        found = located(theirs)
        assert (found.dtype, found.sizes, found.crc) == (name, shape, crc32(raw))
        assert theirs[found.data_at : found.data_at + found.nbytes] == raw

        start = 3 * 64
        frame = frame_tensor(name, shape, start)
        ours = frame.head + raw + frame.tail(crc32(raw))
        again = torch.load(io.BytesIO(ours), weights_only=True)
        assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert again.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
        assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None
        found = located(ours)
        assert (found.dtype, found.sizes, found.crc) == (name, shape, crc32(raw))
        assert (start + found.data_at) % (4096 if len(raw) >= 65536 else 64) == 0


def test_a_record_of_more_than_four_gib_has_wide_sizes():
    sizes = (5 << 30,)
    frame = frame_tensor("uint8", sizes, 0)
    tail = frame.tail(0x1234)
    end = len(frame.head) + frame.nbytes

    def read(offset, count):
        stop = min(offset + count, end + len(tail))
        head, foot = frame.head[offset:stop], tail[max(0, offset - end) : max(0, stop - end)]
        return head + bytes(stop - offset - len(head) - len(foot)) + foot

    found = locate_tensor(read, end + len(tail), "x")
    assert (found.nbytes, found.crc, found.sizes) == (5 << 30, 0x1234, sizes)


@pytest.mark.parametrize(
    "value, reason",
    [
        (torch.arange(6).reshape(2, 3).t(), "strides"),
        (torch.arange(6)[2:], "view"),
        (torch.nn.Parameter(torch.ones(2)), "_rebuild_parameter"),
        ({"a": torch.ones(2)}, "no tensor"),
        ([torch.ones(2), torch.ones(3)], "2 storages"),
        (3, "0 storages"),
    ],
)
def test_what_is_no_plain_tensor_is_unusual(value, reason):
    with pytest.raises(Unusual, match=reason):
        located(by_torch(value))


def test_legacy_compressed_and_big_endian_records_are_unusual():
    with pytest.raises(Unusual, match="legacy"):
        located(by_torch(torch.ones(2), _use_new_zipfile_serialization=False))
    plain = zipfile.ZipFile(io.BytesIO(by_torch(torch.ones(2))))
    for order, method, reason in ((b"little", zipfile.ZIP_DEFLATED, "compressed"), (b"big", 0, "byte order")):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as other:
            for name in plain.namelist():
                other.writestr(name, order if name.endswith("byteorder") else plain.read(name))
        with pytest.raises(Unusual, match=reason):
            located(stream.getvalue())


def test_without_a_checksum_it_says_so():
    torch.serialization.set_crc32_options(False)
    try:
        content = by_torch(torch.ones(2))
    finally:
        torch.serialization.set_crc32_options(True)
    # Torch may store 0, or a sum of another kind; 0 is what "none" looks like.
    assert located(content).crc == zipfile.ZipFile(io.BytesIO(content)).getinfo("archive/data/0").CRC


def test_truncated_at_every_length_is_corrupt():
    content = by_torch(torch.arange(6.0))
    for length in range(len(content)):
        with pytest.raises(CheckpointCorrupt) as caught:
            located(content[:length])
        assert "leaf in file" in caught.value.where


def test_no_flipped_bit_moves_the_tensor():
    content = by_torch(torch.arange(6.0))
    good = located(content)
    outcomes = set()
    for place in range(8 * len(content)):
        bad = bytearray(content)
        bad[place // 8] ^= 1 << place % 8
        try:
            found = located(bytes(bad))
        except (CheckpointCorrupt, Unusual) as error:
            outcomes.add(type(error))
            continue
        # A flipped checksum is found out when the data is compared with it.
        assert (found.data_at, found.nbytes, found.dtype, found.sizes) == (
            good.data_at,
            good.nbytes,
            good.dtype,
            good.sizes,
        )
    assert outcomes == {CheckpointCorrupt, Unusual}
