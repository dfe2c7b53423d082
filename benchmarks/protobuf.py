"""Wire format of protocol buffers, as far as requests of remote-write need it: for benchmarks that write in bulk."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A whole number ≥ 0 in seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(tag: int, payload: bytes) -> bytes:
    """A field of given length: `tag` is its number and wire type in one byte."""
    return bytes([tag]) + varint(len(payload)) + payload
