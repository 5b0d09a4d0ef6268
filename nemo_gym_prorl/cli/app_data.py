# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data``: a command for each family of tasks, whose own part is a function from a record to a row. As in
``cli.py``, modules are imported by the command that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


app = typer.Typer(
    name="data", help="Make rows for an environment from a published dataset's own.", no_args_is_help=True
)
Source = Annotated[
    Path,
    typer.Argument(metavar="FILE", dir_okay=False, help="The dataset: .jsonl, .jsonl.gz, .json, .parquet or .csv."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="JSONL file for the rows. Default: standard output.")
]
DataSource = Annotated[
    str | None,
    typer.Option(
        help="`data_source` of all rows, by which a mixture routes them. Default: one that prorl_mixture has."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing: print what is kept and dropped, and two rows.")
]


@app.command("math")
def math(file: Source, output: Output = None, data_source: DataSource = None, dry_run: DryRun = False) -> None:
    """Problems with a final answer: DAPO, NuminaMath, GSM8K, MATH, or any records with `problem` and `answer`.

    Exit code 1 if a record is malformed. docs/environments.md lists the sets.
    """
    from nemo_gym_prorl.tasks.extras import require_extras

    require_extras("math")  # first: the next import needs it
    from nemo_gym_prorl.tasks.math.task import requiring_readable, row_of

    with requiring_readable(row_of) as readable_row_of:
        _convert(file, output, readable_row_of, data_source, dry_run)


@app.command("stem")
def stem(file: Source, output: Output = None, data_source: DataSource = None, dry_run: DryRun = False) -> None:
    """Questions of science: GPQA, MMLU-Pro, SCP-116K, or any records with `question` and `answer` or `options`.

    Exit code 1 if a record is malformed. docs/environments.md lists the sets.
    """
    from nemo_gym_prorl.tasks.stem.problems import row_of

    _convert(file, output, row_of, data_source, dry_run)


@app.command("index")
def index(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            exists=True,
            dir_okay=False,
            help="The corpus: records with `text`, `title`, `url` (.jsonl, .json, .parquet), or texts (.txt, .md).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the index.")],
) -> None:
    """Make an offline search index, for the `search` of prorl_stem."""
    from nemo_gym_prorl.cli.data import make_index

    make_index(files, output)


@app.command("code")
def code(
    file: Source,
    output: Output = None,
    tests_folder: Annotated[
        Path | None,
        typer.Option(help="Write each problem's tests to a file here, which its row names. Default: into the row."),
    ] = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Programming problems with tests: LiveCodeBench, DeepCoder, TACO, MBPP, rows of NeMo Gym's code_gen.

    Exit code 1 if a record is malformed. docs/environments.md lists the sets.
    """
    from nemo_gym_prorl.tasks.code.convert import row_of

    _convert(
        file,
        output,
        partial(row_of, tests_folder=None if dry_run else tests_folder),
        data_source,
        dry_run,
    )


@app.command("swe")
def swe(
    file: Source,
    dataset: Annotated[
        str, typer.Option(help="swe-bench, swe-gym, swe-rebench or r2e-gym: whose fields the records have.")
    ],
    images: Annotated[
        str | None, typer.Option(help="Registry and folder that has the images. Default: where the dataset's are.")
    ] = None,
    output: Output = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Issues of repositories, with hidden tests: SWE-bench, SWE-Gym, SWE-rebench, R2E-Gym.

    `prorl image pull --from ROWS` fetches their images. Exit code 1 if a record is malformed.
    docs/environments.md lists the sets.
    """
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.images.reference import registry
    from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS

    if dataset not in CONVERTERS:
        raise CallerError(f"{dataset!r} is none of {', '.join(CONVERTERS)}", field="--dataset")
    prefix = images.rstrip("/") if images else None

    def row_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
        row = CONVERTERS[dataset](record, prefix)
        registry(row["image"])  # raises what says that it is none
        return row

    _convert(file, output, row_of, data_source, dry_run)


def _convert(
    file: Path,
    output: Path | None,
    row_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    data_source: str | None,
    dry_run: bool,
) -> None:
    from nemo_gym_prorl.cli.data import convert

    if not convert(file, output, row_of, data_source, dry_run=dry_run):
        raise typer.Exit(1)
