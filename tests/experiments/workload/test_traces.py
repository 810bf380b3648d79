"""Trace replay: the published files, and every way in which a file can be bad."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil

import numpy as np
import pytest

from experiments.workload import TraceSpec, build
from experiments.workload.traces import PUBLISHED, check_published, main, read_trace
from tessa.errors import UserError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = [
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:51.2224670,879,55",
    "2023-11-16 18:16:46.6805900,91,16",
]
TRACED = {part: {"kind": "trace"} for part in ("arrivals", "prompt_tokens", "output_tokens")}


def write(path, lines, end="\n"):
    path.write_bytes((end.join(lines) + end).encode())
    return str(path)


def azure(tmp_path, *lines, **over):
    return read_trace(TraceSpec("azure", write(tmp_path / "t.csv", [HEADER, *lines]), **over))


def test_azure_rows(tmp_path):
    t = azure(tmp_path, *ROWS)
    assert t.arrival_s == pytest.approx([0, 4.314579, 4.541877, 60.0], abs=1e-9)
    assert t.prompt_tokens.tolist() == [374, 396, 879, 91]
    assert t.output_tokens.tolist() == [44, 109, 55, 16]
    assert t.adapter is None
    assert (t.meta["rows"], t.meta["span_s"], t.meta["published"]) == (4, 60.0, None)


def test_window_and_speedup(tmp_path):
    t = azure(tmp_path, *ROWS, window_start_s=4.0, window_s=56.0, speedup=2.0)
    assert t.arrival_s == pytest.approx([0.1572895, 0.2709385], abs=1e-9)
    assert (t.meta["rows_in_window"], t.meta["rows_outside_window"]) == (2, 2)
    with pytest.raises(UserError, match=r"no row of .* lies in the window .* spans 60.000 s"):
        azure(tmp_path, *ROWS, window_start_s=61.0)


def test_long_rows_are_clipped_or_skipped_and_counted(tmp_path):
    t = azure(tmp_path, *ROWS, max_prompt_tokens=380, max_output_tokens=50)
    assert t.prompt_tokens.tolist() == [374, 380, 380, 91]
    assert t.output_tokens.tolist() == [44, 50, 50, 16]
    assert (t.meta["clipped_prompt_tokens"], t.meta["clipped_output_tokens"], t.meta["skipped_too_long"]) == (
        2,
        2,
        0,
    )
    t = azure(tmp_path, *ROWS, max_prompt_tokens=380, max_output_tokens=50, over="skip")
    assert t.prompt_tokens.tolist() == [374, 91]
    assert (t.meta["clipped_prompt_tokens"], t.meta["clipped_output_tokens"], t.meta["skipped_too_long"]) == (
        0,
        0,
        2,
    )
    with pytest.raises(UserError, match=r"every row of .* was skipped"):
        azure(tmp_path, *ROWS, max_prompt_tokens=1, over="skip")


def test_zero_lengths_are_errors_or_counted(tmp_path):
    rows = [*ROWS[:2], "2023-11-16 18:15:51.2,5,0", ROWS[3]]
    with pytest.raises(UserError, match=r"t.csv, line 4: GeneratedTokens is 0 .*zero_length=skip"):
        azure(tmp_path, *rows)
    t = azure(tmp_path, *rows, zero_length="skip")
    assert t.meta["skipped_zero_length"] == 1
    assert len(t.arrival_s) == 3


def test_mooncake_is_in_milliseconds(tmp_path):
    rows = [{"timestamp": ms, "input_length": 10, "output_length": 2, "hash_ids": [1]} for ms in (0, 0, 3000)]
    t = read_trace(TraceSpec("mooncake", write(tmp_path / "m.jsonl", map(json.dumps, rows))))
    assert t.arrival_s.tolist() == [0.0, 0.0, 3.0]


def test_burstgpt_with_its_models_as_adapters(tmp_path):
    path = write(
        tmp_path / "b.csv",
        [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,GPT-4,472,18,490,Conversation log",
            "45.5,ChatGPT,1087,230,1317,API log",
            "118,,417,276,693,Conversation log",
            "120,GPT-4,4,2,6,API log",
        ],
    )
    spec = TRACED | {"popularity": {"kind": "trace"}, "trace": {"format": "burstgpt", "path": path}}
    w = build(spec, 100)
    assert w.arrival_s.tolist() == [0.0, 40.5, 113.0, 115.0]
    assert w.adapter.tolist() == [0, 1, -1, 0]
    assert w.num_adapters == 2
    assert w.meta["trace"]["adapter_labels"] == ["GPT-4", "ChatGPT"]
    assert build(spec | {"num_adapters": 5}, 100).num_adapters == 5
    assert (build(spec | {"num_adapters": 0}, 100).adapter == -1).all()
    with pytest.raises(UserError, match="names 2 adapters but num_adapters is 1"):
        build(spec | {"num_adapters": 1}, 100)
    with pytest.raises(UserError, match="base_fraction cannot be combined"):
        build(spec | {"base_fraction": 0.1}, 100)


def test_adapters_are_numbered_by_their_first_row_in_the_window(tmp_path):
    path = write(tmp_path / "g.csv", ["t,i,o,a", "0,1,1,x", "1,1,1,y", "2,1,1,z", "3,1,1,y"])
    columns = {"time": "t", "prompt_tokens": "i", "output_tokens": "o", "adapter": "a"}
    t = read_trace(TraceSpec("csv", path, columns, window_start_s=1.0), with_adapter=True)
    assert t.adapter.tolist() == [0, 1, 0]
    assert t.meta["adapter_labels"] == ["y", "z"]


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_generic_files_with_a_column_map(tmp_path, unit, factor):
    columns = {"time": "when", "prompt_tokens": "p", "output_tokens": "o"}
    rows = [{"o": 3, "p": 4, "when": 7 * factor, "more": None}, {"o": 5, "p": 6, "when": 7.5 * factor}]
    path = write(tmp_path / "g.jsonl", map(json.dumps, rows))
    t = read_trace(TraceSpec("jsonl", path, columns, time_unit=unit))
    assert t.arrival_s.tolist() == [0.0, 0.5]
    assert t.prompt_tokens.tolist() == [4, 6]
    path = write(tmp_path / "g.csv", ["o,p,when", *(f"{r['o']},{r['p']},{r['when']}" for r in rows)])
    assert read_trace(TraceSpec("csv", path, columns, time_unit=unit)).arrival_s.tolist() == [0.0, 0.5]
    with pytest.raises(UserError, match="no column for output_tokens"):
        read_trace(TraceSpec("csv", path, {"time": "when", "prompt_tokens": "p"}))


def test_the_same_rows_in_any_wrapping(tmp_path):
    plain = azure(tmp_path, *ROWS)
    text = "\n".join([HEADER, *ROWS])
    wrappings = {
        "crlf.csv": text.replace("\n", "\r\n").encode(),
        "no_final_newline.csv": text.encode(),
        "blank_at_the_end.csv": (text + "\n\n\n").encode(),
        "bom.csv": b"\xef\xbb\xbf" + text.encode(),
        "packed.csv.gz": gzip.compress(text.encode()),
        "packed_under_another_name.csv": gzip.compress(text.encode()),
        "two_members.csv.gz": gzip.compress(text[:60].encode()) + gzip.compress(text[60:].encode()),
        "quoted.csv": "\n".join([HEADER, *(",".join(f'"{v}"' for v in r.split(",")) for r in ROWS)]).encode(),
    }
    for name, data in wrappings.items():
        (tmp_path / name).write_bytes(data)
        t = read_trace(TraceSpec("azure", str(tmp_path / name)))
        assert t.arrival_s.tolist() == plain.arrival_s.tolist(), name
        assert t.prompt_tokens.tolist() == plain.prompt_tokens.tolist(), name
        assert t.meta["byte_order_mark"] == (name == "bom.csv")


def replaced(row, value, column):
    fields = ROWS[row].split(",")
    fields[column] = value
    return [*ROWS[:row], ",".join(fields), *ROWS[row + 1 :]]


BAD_CSV = {
    "empty": (b"", 1, "the file is empty"),
    "only blank": (b"\n\n", 1, "the file is empty"),
    "header only": (HEADER.encode(), 1, "no row after it"),
    "missing column": (
        b"TIMESTAMP,ContextTokens\n1,2\n",
        1,
        "column 'GeneratedTokens' is missing; found TIMESTAMP",
    ),
    "column twice": (f"{HEADER},ContextTokens\n".encode(), 1, "occurs 2 times"),
    "semicolons": (b"TIMESTAMP;ContextTokens;GeneratedTokens\n", 1, "column 'TIMESTAMP' is missing"),
    "negative length": (replaced(1, "-5", 1), 3, "ContextTokens is '-5'; a length cannot be negative"),
    "fractional length": (replaced(2, "5.5", 2), 4, "GeneratedTokens is '5.5', not a whole number"),
    "empty length": (replaced(0, "", 1), 2, "ContextTokens is '', not a whole number"),
    "word as length": (replaced(3, "many", 1), 5, "'many', not a whole number"),
    "infinite length": (replaced(3, "inf", 1), 5, "'inf', not a whole number"),
    "huge length": (replaced(3, "99999999999", 1), 5, "more than 2147483647"),
    "unparsable time": (replaced(2, "yesterday", 0), 4, "TIMESTAMP is 'yesterday', not a date"),
    "impossible date": (replaced(2, "2023-13-45 00:00:00", 0), 4, "not a date and time"),
    "empty time": (replaced(1, "", 0), 3, "not a date and time"),
    "unsorted": ([ROWS[1], ROWS[0]], 3, "is before '2023-11-16 18:15:50.9951690' of the row above; sort"),
    "too few fields": ([ROWS[0], "2023-11-16 18:15:50,3"], 3, "2 fields where the header has 3"),
    "too many fields": ([ROWS[0], ROWS[1] + ",1"], 3, "4 fields where the header has 3"),
    "blank line inside": ([ROWS[0], "", ROWS[1]], 3, "blank line between rows"),
    "open quote": ([ROWS[0], '"2023,1,2'], 3, "not valid CSV"),
    "latin-1": (f"{HEADER}\n{ROWS[0]}\ncaf\xe9,1,2\n".encode("latin-1"), 3, "byte 0xe9 is not UTF-8"),
    "utf-16": (f"{HEADER}\n{ROWS[0]}\n".encode("utf-16"), 1, "UTF-16"),
    "utf-16 without mark": (f"{HEADER}\n{ROWS[0]}\n".encode("utf-16-le"), 1, "UTF-16"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_bad_csv_is_one_line_with_file_and_line_number(tmp_path, case):
    content, line, message = BAD_CSV[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else "\n".join([HEADER, *content]).encode())
    with pytest.raises(UserError) as error:
        read_trace(TraceSpec("azure", str(path)))
    text = str(error.value)
    assert text.startswith(f"{path}, line {line}: "), text
    assert message in text
    assert "\n" not in text


GOOD_JSON = '{"timestamp": 0, "input_length": 5, "output_length": 2}'
BAD_JSONL = {
    "not json": ('{"timestamp": 0,', "not valid JSON"),
    "not an object": ("[1, 2]", "not a JSON object"),
    "missing key": ('{"timestamp": 0, "input_length": 5}', "column 'output_length' is missing"),
    "boolean": ('{"timestamp": 0, "input_length": true, "output_length": 2}', "input_length is True"),
    "null": (
        '{"timestamp": null, "input_length": 1, "output_length": 2}',
        "timestamp is None, not a number of ms",
    ),
    "list": ('{"timestamp": 0, "input_length": [1], "output_length": 2}', "not a whole number"),
    "nan": ('{"timestamp": NaN, "input_length": 1, "output_length": 2}', "not a number of ms"),
    "earlier": ('{"timestamp": -1, "input_length": 1, "output_length": 2}', "is before 0 of the row above"),
    "blank": ("", "blank line between rows"),
}


@pytest.mark.parametrize("case", BAD_JSONL)
def test_bad_jsonl_is_one_line_with_file_and_line_number(tmp_path, case):
    line, message = BAD_JSONL[case]
    path = write(tmp_path / "bad.jsonl", [GOOD_JSON, line, GOOD_JSON])
    with pytest.raises(UserError) as error:
        read_trace(TraceSpec("mooncake", path))
    text = str(error.value)
    assert text.startswith(f"{path}, line 2: "), text
    assert message in text
    assert "\n" not in text


def test_line_numbers_hold_across_quoted_line_breaks(tmp_path):
    path = write(tmp_path / "q.csv", ["t,i,o,note", '0,1,1,"two', 'lines"', "1,-1,1,x"])
    with pytest.raises(UserError, match="line 4: i is '-1'"):
        read_trace(TraceSpec("csv", path, {"time": "t", "prompt_tokens": "i", "output_tokens": "o"}))


def test_damaged_gzip_is_named(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"2023-11-16 18:{m:02d}:{s:02d},{rng.integers(1, 9999)},5" for m in range(60) for s in range(60)]
    packed = gzip.compress("\n".join([HEADER, *rows]).encode())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(packed)
    assert len(read_trace(TraceSpec("azure", str(path))).arrival_s) == 3600
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"t.csv.gz, line 1\d\d\d: the gzip data ends early"):
        read_trace(TraceSpec("azure", str(path)))
    broken = bytearray(packed)
    broken[-8] ^= 0xFF  # the checksum
    path.write_bytes(broken)
    with pytest.raises(UserError, match=r"line \d+: the gzip data is damaged"):
        read_trace(TraceSpec("azure", str(path)))


def test_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"python -m experiments\.workload\.traces"):
        read_trace(TraceSpec("azure", str(tmp_path / "none.csv")))
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(TraceSpec("azure", str(tmp_path)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "sharegpt"},
        {"over": "drop"},
        {"zero_length": "one"},
        {"time_unit": "minutes"},
        {"columns": {"when": "t"}},
        {"speedup": 0.0},
        {"window_start_s": -1.0},
        {"window_s": 0.0},
        {"max_prompt_tokens": 0},
    ],
)
def test_trace_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError):
        TraceSpec(**{"format": "azure", "path": "x"} | wrong)


def test_num_requests_keeps_the_first_rows(tmp_path):
    path = write(tmp_path / "t.csv", [HEADER, *ROWS])
    spec = TRACED | {"num_adapters": 0, "trace": {"format": "azure", "path": path}}
    w = build(spec | {"num_requests": 3}, 1000)
    assert w.output_tokens.tolist() == [44, 109, 55]
    assert w.meta["trace"]["rows_after_num_requests"] == 1
    with pytest.raises(UserError, match="holds 4 usable rows"):
        build(spec | {"num_requests": 5}, 1000)


def test_lengths_of_a_trace_with_arrivals_of_ones_own(tmp_path):
    path = write(tmp_path / "t.csv", [HEADER, *ROWS])
    spec = TRACED | {
        "arrivals": {"kind": "all_at_once"},
        "num_adapters": 0,
        "trace": {"format": "azure", "path": path},
    }
    w = build(spec, 1000)
    assert w.arrival_s.tolist() == [0.0] * 4
    assert w.prompt_lengths.tolist() == [374, 396, 879, 91]


def test_hash_follows_the_content_of_the_trace_not_its_place(tmp_path):
    spec = TRACED | {"popularity": {"kind": "uniform"}, "num_adapters": 3}
    hashes = []
    for name, rows in (("a.csv", ROWS), ("b.csv", ROWS), ("c.csv", replaced(3, "92", 1))):
        path = write(tmp_path / name, [HEADER, *rows])
        hashes.append(build(spec | {"trace": {"format": "azure", "path": path}}, 1000).hash)
    assert hashes[0] == hashes[1] != hashes[2]


PUBLISHED_NUMBERS = {
    "AzureLLMInferenceTrace_conv.csv": (19366, 3501.721937, 14050, 1000),
    "AzureLLMInferenceTrace_code.csv": (8819, 3435.948056, 7437, 1899),
    "mooncake_conversation_trace.jsonl": (12031, 3536.999, 126195, 2000),
}


@pytest.mark.parametrize("name", PUBLISHED_NUMBERS)
def test_published_traces_read_whole(shared_dir, name):
    item = next(p for p in PUBLISHED if p.name == name)
    t = read_trace(TraceSpec(item.format, str(shared_dir / "traces" / name)))
    rows, span, longest_prompt, longest_output = PUBLISHED_NUMBERS[name]
    assert len(t.arrival_s) == t.meta["rows"] == rows
    assert t.meta["span_s"] == pytest.approx(span, abs=1e-6)
    assert (t.prompt_tokens.max(), t.output_tokens.max()) == (longest_prompt, longest_output)
    assert t.meta["published"] == name


def test_first_two_minutes_of_azure_conv(shared_dir):
    path = str(shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv")
    spec = TRACED | {
        "popularity": {"kind": "slora_power", "alpha": 0.3},
        "num_adapters": 20,
        "trace": {
            "format": "azure",
            "path": path,
            "window_s": 120.0,
            "speedup": 4.0,
            "max_prompt_tokens": 512,
        },
    }
    w = build(spec, 32000)
    assert len(w) == 456
    assert w.arrival_s.max() < 30.0
    assert w.prompt_lengths.max() == 512
    assert w.meta["trace"]["clipped_prompt_tokens"] == (w.prompt_lengths == 512).sum()


def test_published_files_are_checked(shared_dir, tmp_path, capsys):
    states = {item.name: state for item, state in check_published(shared_dir / "traces")}
    assert states["AzureLLMInferenceTrace_conv.csv"] == "ok"
    assert states["mooncake_conversation_trace.jsonl"] == "ok"
    name = "AzureLLMInferenceTrace_code.csv"
    shutil.copy(shared_dir / "traces" / name, tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{name}: ok" in out
    assert "AzureLLMInferenceTrace_conv.csv: missing" in out
    assert "get it from https://" in out
    with (tmp_path / name).open("a") as f:
        f.write("x")
    assert main([str(tmp_path)]) == 1
    assert "wrong hash" in capsys.readouterr().out


def test_published_list_is_consistent():
    for a, b in itertools.combinations(PUBLISHED, 2):
        assert a.sha256 != b.sha256
    assert all(len(p.sha256) == 64 for p in PUBLISHED)
