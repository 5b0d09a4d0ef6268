# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of records to rows for all families, and the command ``prorl data``.

``tests/published`` has a case per published set. ``conversions.jsonl`` has named records (``base``). Other lines are
changes of a named record with the expected row (``wanted``) or the refused field (``refused``).
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner, Result

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.cli.image.images import _images_of_rows
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code import convert
from nemo_gym_prorl.tasks.code.code_rows import read_metadata, read_problem
from nemo_gym_prorl.tasks.math import task as math
from nemo_gym_prorl.tasks.stem import problems as stem
from nemo_gym_prorl.tasks.stem.search import Index
from nemo_gym_prorl.tasks.swe import instance
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from tests.tasks.rows_file import table


TABLE = table(__file__, "conversions.jsonl")
BASES = {row["base"]: row for row in TABLE if "base" in row}
EURUS, APPS, CONTESTS = (BASES[name]["record"] for name in ("eurus", "apps", "contests"))
SWE = ("swe-bench", "swe-gym", "r2e-gym")
CONVERT: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "code": convert.row_of,
    "math": math.row_of,
    "stem": stem.row_of,
    **{name: partial(converter, prefix=None) for name, converter in CONVERTERS.items()},
}
MIXTURE = yaml.safe_load(Path("environments/prorl_mixture/config.yaml").read_text())["prorl_mixture"][
    "responses_api_agents"
]["prorl_agent"]["environments"]
ROUTED = {name: {name, *environment["data_sources"]} for name, environment in MIXTURE.items()}
"""Values of ``data_source`` by environment of the mixture."""


def family_and_record(case: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    base = BASES[case["of"]] if "of" in case else case
    record = base["record"] | case.get("change", {})
    return base["family"], {name: value for name, value in record.items() if name not in case.get("gone", ())}


def facts(family: str, row: dict[str, Any]) -> dict[str, Any]:
    params = row["responses_create_params"]
    found = {
        "asked": params["input"][-1]["content"],
        "tools": sorted(tool["name"] for tool in params.get("tools", [])),
        "source": row["data_source"],
    }
    if family == "code":
        problem = read_problem(read_metadata(row), None)
        return found | {
            "tests": [[test.input, test.expected] for test in problem.tests],
            "function": problem.function,
            "wrapped": problem.checker.get("wrapped"),
            "checker": problem.checker["kind"],
            "limits": [problem.time_limit_s, problem.memory_limit_mib],
            "about": {name: row["verifier_metadata"].get(name) for name in ("dataset", "difficulty")},
        }
    if family in ("math", "stem"):
        return found | {name: row.get(name) for name in ("question", "expected_answer", "options")}
    read = instance.SweRow.parse(row)
    return found | {
        "instance": read.instance_id,
        "image": read.image,
        "command": read.swe.test_command,
        "parser": read.swe.log_parser,
        "network": [read.swe.tests_network, read.network],
        "expected": read.swe.expected_output,
        "fixes": "return a + b" in read.swe.patch,
    }


@pytest.mark.parametrize("case", [case for case in TABLE if "wanted" in case], ids=lambda case: case.get("of", ""))
def test_record_is_converted(case: Mapping[str, Any]) -> None:
    family, record = family_and_record(case)
    found, wanted = facts(family, CONVERT[family](record)), case["wanted"]
    assert {name: found[name] for name in wanted} == wanted
    if family in SWE:
        assert (found["asked"], found["source"], found["fixes"]) == ("Sums are differences.", family, True)
    if family == "code" and case.get("of") != "gym":
        assert found["source"] in {"mine", *ROUTED["code"]}


@pytest.mark.parametrize("case", [case for case in TABLE if "refused" in case], ids=lambda case: str(case["refused"]))
def test_invalid_record_is_refused_by_field(case: Mapping[str, Any]) -> None:
    family, record = family_and_record(case)
    with pytest.raises(CallerError) as caught:
        CONVERT[family](record)
    assert caught.value.field == case["refused"]


# The command. What it does of files is the same for all families.
RECORDS: list[dict[str, Any]] = [
    {"problem": "What is $1 + 1$?", "answer": "2", "solution": "Two."},
    {"id": 60, "problem": "What is $2 + 2$?", "solution": "Four.", "answer": "004", "url": "none", "year": "2024"},
    {"id": 0, "problem": "What is $20 + 7$?", "answer": 27.0, "url": "none"},
]


def written(file: Path, records: list[Any]) -> Path:
    match file.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        case ".json":
            file.write_bytes(orjson.dumps(records))
        case _:
            file.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return file


def prorl_data(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, words)])


def test_invalid_records_are_reported_by_line(tmp_path: Path) -> None:
    bad = [{"problem": "?"}, {"answer": "2"}, {"problem": " ", "answer": "2"}, {"problem": "?", "answer": ""}, 7]
    bad += [{"Frage": "?", "Antwort": "2"}, {"problem": "?", "answer": r"\frac{1}{"}]
    file = written(tmp_path / "data.jsonl", [*bad, RECORDS[0]])
    output = tmp_path / "rows.jsonl"
    done = prorl_data("math", file, "-o", output)
    assert done.exit_code == 1
    assert len(output.read_text().splitlines()) == 1
    for said in (
        "line 1: answer: missing; there are problem",
        "line 2: problem: missing; there are answer",
        "line 3: problem: must be",
        "line 5: must be an object",
        "line 6: problem: missing; there are Frage, Antwort",
        "line 7: expected_answer: ",
    ):
        assert said in done.output
    assert "8 lines: 1 kept, 0 dropped, 7 refused" in done.output


def test_dropped_records_are_counted_with_the_first_of_each_reason(tmp_path: Path) -> None:
    tests = [
        "assert f(1) == 2",
        "assert f(g(1)) == 2",
        "assert f(1) == 2\nassert f(g(2)) == 2",
        "assert f(1) == 2",
        "",
    ]
    tests += ["for x in [1]:\n    assert f(x) == 2", "assert f(1) == 2\nassert g(1) == 2", "assert f(x=1) == 2"]
    records = [{"question": "?", "test": f"import f\n{test}"} for test in tests]
    done = prorl_data("code", written(tmp_path / "set.jsonl", records), "--dry-run")
    for said in (
        "dropped 2: test: its tests compute what they pass or expect; first is line 2: assert f(g(1)) == 2\n",
        "dropped 1: makes the same row as an earlier one; first is line 4\n",
        "dropped 1: test: its tests have no assert; first is line 5\n",
        "first is line 6: for x in [1]:\n",
        "first is line 7: f, g\n",
        "first is line 8: assert f(x=1) == 2\n",
    ):
        assert said in done.stderr
    assert (done.exit_code, "1 kept, 7 dropped, 0 refused" in done.stderr) == (0, True)


def test_science_rows_that_need_a_judge_are_counted(tmp_path: Path) -> None:
    answers = ["5 m/s", "The Krebs cycle", "The Krebs cycle", "By osmosis"]
    file = written(tmp_path / "set.jsonl", [{"question": "How?", "answer": answer} for answer in answers])
    done = prorl_data("stem", file, "--dry-run")
    assert "3 kept, 1 dropped, 0 refused\n2 of them " in done.stderr
    assert "judge_model_server" in done.stderr
    assert "judge" not in prorl_data("stem", written(file, [{"question": "How?", "answer": "5 m/s"}])).stderr


def test_output_must_not_be_the_dataset(tmp_path: Path) -> None:
    file, link = written(tmp_path / "data.jsonl", RECORDS), tmp_path / "link.jsonl"
    link.symlink_to(file)
    before = file.read_bytes()
    for output in (tmp_path / "nowhere" / ".." / "data.jsonl", link):
        done = prorl_data("math", file, "-o", output)
        assert isinstance(done.exception, CallerError)
        assert "is the dataset itself" in done.exception.reason
        assert file.read_bytes() == before


def test_dry_run_reports_and_writes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "set.jsonl", RECORDS)
    wet = prorl_data("math", file, "-o", tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").unlink()
    dry = prorl_data("math", file, "--dry-run", "-o", tmp_path / "rows.jsonl")
    assert (dry.exit_code, dry.stdout, dry.stderr) == (0, "", wet.stderr)
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


def test_code_tests_are_written_to_a_folder(tmp_path: Path) -> None:
    source = written(tmp_path / "set.jsonl", [EURUS, APPS | {"question": ""}, CONTESTS])
    done = prorl_data("code", source, "--output", tmp_path / "rows.jsonl", "--tests-folder", tmp_path / "tests")
    assert done.exit_code == 1
    assert "line 2: question: " in done.stderr
    made = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(read_problem(read_metadata(row), tmp_path / "tests").tests) for row in made] == [1, 2]


def test_data_source_routes_rows_in_the_mixture(tmp_path: Path) -> None:
    source, rows = written(tmp_path / "records.jsonl", RECORDS[:1]), tmp_path / "rows.jsonl"
    for family in ("math", "stem"):
        assert prorl_data(family, source, "-o", rows).exit_code == 0
        assert json.loads(rows.read_text())["data_source"] in ROUTED[family]
        assert prorl_data(family, source, "-o", rows, "--data-source", "mine").exit_code == 0
        assert json.loads(rows.read_text())["data_source"] == "mine"


@pytest.mark.parametrize("dataset", SWE)
def test_swe_rows_list_their_images(dataset: str, tmp_path: Path) -> None:
    record, rows = BASES[dataset]["record"], tmp_path / "rows.jsonl"
    done = prorl_data("swe", written(tmp_path / "set.parquet", [record]), "--dataset", dataset, "-o", rows)
    assert done.exit_code == 0, done.output
    [row] = map(json.loads, rows.read_text().splitlines())
    assert row == CONVERT[dataset](record)
    assert [*_images_of_rows(rows)] == [row["image"]]


def test_index_is_built_from_a_corpus(tmp_path: Path) -> None:
    corpus, text = tmp_path / "corpus.jsonl", tmp_path / "notes.txt"
    written(corpus, [{"text": "Neon is noble.", "title": "Neon", "url": "u"}])
    text.write_text("Iron rusts.\n\nGold does not.")
    done = prorl_data("index", corpus, text, "-o", tmp_path / "index")
    assert (done.exit_code, "3 passages" in done.stderr) == (0, True)
    index = Index(tmp_path / "index")
    assert [(found.title, found.source) for found in index.search("noble neon", 1)] == [("Neon", "u")]
    assert [found.source for found in index.search("gold", 1)] == ["notes.txt"]
    index.close()


@pytest.mark.parametrize("record", [{"title": "x"}, {"text": 7}, []], ids=str)
def test_passage_without_text_is_refused_by_line(record: object, tmp_path: Path) -> None:
    corpus = written(tmp_path / "corpus.jsonl", [{"text": "x"}, record])
    done = prorl_data("index", corpus, "-o", tmp_path / "index")
    assert isinstance(done.exception, CallerError)
    assert f"{corpus}:2" in done.exception.reason
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.jsonl"]
