"""The GGUF header reader against the format's own library, and against files that are cut short or lie."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader, Strings, read_gguf
from tests.small_models import bundled_gguf


@pytest.fixture(scope="module")
def oracle() -> gguf.GGUFReader:
    return gguf.GGUFReader(bundled_gguf())


@pytest.fixture(scope="module")
def bundled() -> GGUFHeader:
    return read_gguf(bundled_gguf())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with a value of every type and three tensors."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo 你好")
    writer.add_uint64("u64", 1 << 60)
    writer.add_int64("i64", -(1 << 60))
    writer.add_float64("f64", 0.1)
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(4, dtype=np.float16))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_bundled_file_s_metadata_is_what_the_gguf_library_reads(
    bundled: GGUFHeader, oracle: gguf.GGUFReader
) -> None:
    expected = {k: f.contents() for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
    read = {k: list(v) if isinstance(v, Strings) else v for k, v in bundled.metadata.items()}
    assert read == expected


def test_the_bundled_file_s_tensors_are_what_the_gguf_library_reads(
    bundled: GGUFHeader, oracle: gguf.GGUFReader
) -> None:
    expected = {
        t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in oracle.tensors
    }
    assert {t.name: (t.shape, t.type, t.offset, t.num_bytes) for t in bundled.tensors.values()} == expected


def test_every_value_type_is_read(small: Path) -> None:
    metadata = read_gguf(small).metadata
    assert metadata["u8"] == 200 and metadata["i8"] == -3
    assert metadata["u16"] == 60000 and metadata["i16"] == -300
    assert metadata["u32"] == 4_000_000_000 and metadata["i32"] == -70000
    assert metadata["u64"] == 1 << 60 and metadata["i64"] == -(1 << 60)
    assert metadata["f32"] == 0.5 and metadata["f64"] == 0.1
    assert metadata["yes"] is True
    assert metadata["text"] == "héllo 你好"
    assert list(metadata["strings"]) == ["a", "", "ß"] and metadata["numbers"] == [1, 2, 3]


def test_a_tensor_s_bytes_lie_where_the_header_says(small: Path) -> None:
    tensors = read_gguf(small).tensors
    one = tensors["one"]
    assert one.shape == (2, 3) and one.type == "F32" and one.num_bytes == 24
    raw = small.read_bytes()[one.offset : one.offset + one.num_bytes]
    assert np.frombuffer(raw, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert tensors["three"].shape == (2, 64) and tensors["three"].num_bytes == 4 * 34


def test_version_2_is_read(small: Path) -> None:
    raw = bytearray(small.read_bytes())
    raw[4] = 2
    small.write_bytes(raw)
    assert read_gguf(small).version == 2


def test_a_file_cut_short_anywhere_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    header = read_gguf(small)
    end = max(t.offset + t.num_bytes for t in header.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(raw[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_random_damage_gives_a_header_or_a_config_error_never_anything_else(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    rng = random.Random(7)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(1500):
        copy = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            copy[rng.randrange(600)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.write_bytes(copy)
        try:
            read_gguf(damaged)
        except ConfigError:
            refused += 1
    assert refused > 300


def header(version: int = 3, tensors: int = 0, pairs: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5
ALIGNED = b"\0" * 256


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(pairs=1 << 60), "number of metadata pairs"),
        (header(tensors=1 << 60), "number of tensors"),
        (header(pairs=1, body=struct.pack("<Q", 1 << 62)), "cut short"),
        (header(pairs=1, body=text("k") + struct.pack("<I", 77) + bytes(8)), "unknown value type 77"),
        (header(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 4, 1 << 40)), "length of 'k'"),
        (header(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 8, 1 << 20)), "strings of 'k'"),
        (header(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 4, 1 << 20)), "values of 'k'"),
        (header(pairs=1, body=NESTED + bytes(200)), "deep"),
        (header(pairs=2, body=(text("k") + struct.pack("<IB", 0, 1)) * 2), "'k' appears twice"),
        (header(tensors=1, body=tensor("t", (1 << 50,), 0, 0)), "shape"),
        (header(tensors=1, body=tensor("t", (0, 4), 0, 0)), "shape"),
        (header(tensors=1, body=tensor("t", (1, 1, 1, 1, 1), 0, 0)), "5 dimensions"),
        (header(tensors=1, body=tensor("t", (4,), 999, 0) + ALIGNED), "type number 999"),
        (header(tensors=1, body=tensor("t", (33,), 8, 0) + ALIGNED), "whole blocks"),
        (header(tensors=1, body=tensor("t", (4,), 0, 7) + ALIGNED), "multiple of 32"),
        (header(tensors=1, body=tensor("t", (1 << 30,), 0, 0) + ALIGNED), "cut short: the tensor 't'"),
        (header(tensors=2, body=tensor("t", (4,), 0, 0) * 2 + ALIGNED), "'t' appears twice"),
        (header(pairs=1, body=text("general.alignment") + struct.pack("<II", 4, 24)), "power of two"),
    ],
)
def test_a_file_that_lies_is_refused_with_what_is_wrong(tmp_path: Path, raw: bytes, complaint: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_gguf(path)
    assert "odd.gguf" in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read"):
        read_gguf(tmp_path / "none.gguf")


def test_strings_of_an_array_are_a_sequence(bundled: GGUFHeader, oracle: gguf.GGUFReader) -> None:
    tokens = bundled.metadata["tokenizer.ggml.tokens"]
    expected = oracle.fields["tokenizer.ggml.tokens"].contents()
    assert list(tokens) == expected
    assert len(tokens) == len(expected)
    assert [tokens[i] for i in (0, 1, 17_000, len(expected) - 1, -1)] == [
        expected[i] for i in (0, 1, 17_000, len(expected) - 1, -1)
    ]
    assert tokens[100:103] == expected[100:103] and tokens[::-9_000] == expected[::-9_000]
    assert expected[5] in tokens and tokens.index(expected[5]) == 5
    with pytest.raises(IndexError):
        tokens[len(expected)]
