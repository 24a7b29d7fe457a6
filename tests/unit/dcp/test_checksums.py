import os
import zlib

import pytest

from orlop.dcp.checksums import BLOCK_BYTES, BlockCrcs, combine, crc32, pack, unpack

DATA = os.urandom(3 * BLOCK_BYTES + 1000)


def test_the_chosen_crc_is_zlibs():
    assert crc32(DATA) == zlib.crc32(DATA)
    assert crc32(DATA[10:], crc32(DATA[:10])) == zlib.crc32(DATA)


@pytest.mark.parametrize("cut", [0, 1, 7, BLOCK_BYTES, len(DATA)])
def test_combined_crcs_are_the_crc_of_the_whole(cut):
    assert combine(zlib.crc32(DATA[:cut]), zlib.crc32(DATA[cut:]), len(DATA) - cut) == zlib.crc32(DATA)


@pytest.mark.parametrize("step", [1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 10**6])
def test_blocks_are_the_same_however_the_bytes_come(step):
    blocks = BlockCrcs()
    for start in range(0, len(DATA), step):
        blocks.add(memoryview(DATA)[start : start + step])
        blocks.add(memoryview(b""))
    expected = [zlib.crc32(DATA[at : at + BLOCK_BYTES]) for at in range(0, len(DATA), BLOCK_BYTES)]
    assert blocks.crcs() == expected
    assert blocks.total() == zlib.crc32(DATA)


def test_no_bytes_have_no_blocks():
    assert (BlockCrcs().crcs(), BlockCrcs().total()) == ([], 0)


def test_packed_rows_come_back_and_damaged_ones_are_refused():
    row = [0, 1, 0xFFFFFFFF]
    assert unpack(pack(row)).tolist() == row
    for text in ("abc", "ab!=", "YWI="):
        with pytest.raises(ValueError, match="checksums"):
            unpack(text)
