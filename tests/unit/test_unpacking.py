import gzip
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from steplab.limits import LimitReached
from steplab.units import MIB
from steplab.unpacking import Unpacked

PACKINGS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "gzip": gzip.compress, "xz": lzma.compress}
CONTENT = bytes(range(256)) * 4000


class Trickle(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 3))

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[:5])


@pytest.mark.parametrize("packing", PACKINGS)
def test_everything_comes_out(packing: str) -> None:
    packed = PACKINGS[packing](CONTENT)
    assert Unpacked(io.BytesIO(packed)).readall() == CONTENT
    assert Unpacked(Trickle(PACKINGS[packing](CONTENT[:5000]))).readall() == CONTENT[:5000]
    assert Unpacked(io.BytesIO(PACKINGS[packing](b""))).readall() == b""
    lines = io.BufferedReader(Unpacked(io.BytesIO(PACKINGS[packing](b"one\ntwo\n\nlast"))))
    assert lines.readlines() == [b"one\n", b"two\n", b"\n", b"last"]


@pytest.mark.parametrize("packing", ["gzip", "xz"])
def test_members_follow_each_other_and_padding_is_ignored(packing: str) -> None:
    pack = PACKINGS[packing]
    whole = pack(b"one ") + b"\0" * 8 + pack(b"two ") + pack(b"three") + b"\0" * 512
    assert Unpacked(io.BytesIO(whole)).readall() == b"one two three"


@pytest.mark.parametrize("packing", ["gzip", "xz"])
def test_damage_ends_the_stream_and_is_said(packing: str) -> None:
    packed = PACKINGS[packing](CONTENT)
    cut = Unpacked(io.BytesIO(packed[: len(packed) // 2]))
    assert CONTENT.startswith(cut.readall())
    assert cut.damage == f"the {packing} stream ends early"
    spoiled = Unpacked(io.BytesIO(packed[:40] + b"\xff" * 40 + packed[80:]))
    assert len(spoiled.readall()) < len(CONTENT)
    assert spoiled.damage
    assert spoiled.damage.startswith(f"the {packing} stream is damaged (")


@pytest.mark.parametrize("packing", PACKINGS)
def test_bytes_are_counted_as_they_come_out(packing: str) -> None:
    with pytest.raises(LimitReached, match="it has more than 512"):
        Unpacked(io.BytesIO(PACKINGS[packing](CONTENT)), most_bytes=MIB // 2).readall()
    assert Unpacked(io.BytesIO(PACKINGS[packing](CONTENT)), most_bytes=MIB).readall() == CONTENT


def test_an_xz_file_says_how_much_memory_it_takes_and_is_refused_for_it() -> None:
    assert Unpacked(io.BytesIO(lzma.compress(b"x", preset=9))).readall() == b"x"  # a dictionary of 64 MiB
    huge = bytearray(lzma.compress(b"x"))
    dictionary = huge.index(b"\x21\x01", 12) + 2  # of the filter LZMA2 the properties, of one byte
    huge[dictionary] = 36  # 1 GiB, by the format's table
    end = 12 + (huge[12] + 1) * 4  # of the block's header, which closes with its checksum
    huge[end - 4 : end] = struct.pack("<I", zlib.crc32(huge[12 : end - 4]))
    refused = Unpacked(io.BytesIO(bytes(huge)))
    assert refused.readall() == b""
    assert refused.damage == "the xz stream takes more than 256 MiB to unpack"
