# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the ``prorl`` command, and the declarations of its main subcommands.

Each subcommand imports its modules when it runs, so ``prorl --help`` does not import web frameworks. A
:class:`~nemo_gym_prorl.failures.RolloutError`, or a service's refusal (``ApiError``), prints one line and exits with
code 1. Any other exception is a bug and prints a traceback.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer

from nemo_gym_prorl.cli.admin import Token, Url, backends_app, key_app
from nemo_gym_prorl.cli.data.commands import data_app
from nemo_gym_prorl.cli.harness import harness_app
from nemo_gym_prorl.cli.image.commands import image_app


app = typer.Typer(
    name="prorl",
    help="Rollout service for NeMo Gym: runs agents in sandboxes and returns token-exact trajectories with rewards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


GatewayKeys = Annotated[
    Path | None, typer.Option("--keys-file", help="File with the keys of the gateway's clients, see `prorl key`.")
]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hugging Face name of the tokenizer.")]
GatewayJournal = Annotated[
    str | None,
    typer.Option(
        "--journal",
        help="Folder on a local disk in which the gateway stores its rollouts, so that they survive a restart.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("prorl", version("nemo-gym-prorl"))
        raise typer.Exit


@app.callback()
def prorl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the options of the program itself."""


@app.command()
def setup() -> None:
    """Install the container runtime and build the default sandbox image.

    Writes only to the cache folder (PRORL_CACHE). Installed parts are kept, so a second run does nothing. The image
    with IPython is built later, when a task needs it.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli.image.images import progress_step
    from nemo_gym_prorl.sandbox.images.builder import (
        DEFAULT,
        default_image_path,
        ensure_image,
        run_self_test,
    )
    from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime

    console = Console(highlight=False)
    with progress_step(console, "Container runtime") as say:
        runtime = ensure_runtime(say)
        say(f"apptainer {runtime.version_text}, {runtime.path}")
    with progress_step(console, "Default sandbox image") as say:
        say(str(ensure_image(DEFAULT, say)))
    with progress_step(console, "Test container") as say:
        say(", ".join(run_self_test(default_image_path(), runtime).splitlines()))


@app.command()
def doctor(
    policy_url: Annotated[
        str | None,
        typer.Option(help="Check whether this inference endpoint can be used for training, instead of the machine."),
    ] = None,
    policy_model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")] = "",
    policy_key: Annotated[str, typer.Option(envvar="PRORL_API_KEY", help="Key of the endpoint.")] = "",
    tokenizer: Tokenizer = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file of the chat template. Default: the tokenizer's own.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="vLLM's name of the tool-call parser. Default: detected from the template.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "vllm_chat", "nemo_rl", "sglang"] | None,
        typer.Option(help="Protocol of the endpoint. Default: vllm, or vllm_chat without a tokenizer."),
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Check whether tests of these Harbor tasks run offline.")] = None,
    verifier_tools: Annotated[Path | None, typer.Option(help="Folder of `prorl image tools`, for --tasks.")] = None,
) -> None:
    """Check this machine, an inference endpoint or a folder of tasks, and name fixes.

    Exit code 1 if rollouts cannot run.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli import doctor as command

    policy: dict[str, object] | None = None
    if policy_url is not None:
        policy = {"base_url": [policy_url], "model": policy_model or tokenizer or "", "api_key": policy_key}
        policy |= {"tokenizer": tokenizer, "chat_template": chat_template, "engine": engine}
        policy["tool_call_parser"] = tool_call_parser
    checks = None
    if tasks is not None:
        from nemo_gym_prorl.cli.image.tools import check_tasks

        checks = check_tasks(tasks, verifier_tools)
    if not command.show(Console(highlight=False), policy, checks):
        raise typer.Exit(1)


@app.command()
def demo(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides for Gym (++key=value).")] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Number of rollouts.")] = 16,
    output: Annotated[Path, typer.Option(help="JSONL file for the results.")] = Path("out/demo.jsonl"),
) -> None:
    """Run HumanEval rollouts in a Gym deployment with sandboxes on this machine.

    Set PRORL_MODEL_URL (and PRORL_MODEL_NAME, PRORL_API_KEY) to use a model. Otherwise the policy is scripted. Exit
    code 1 if a rollout was not scored, or a scripted rollout got an unexpected reward.
    """
    from nemo_gym_prorl.cli.scripted.demo import Demo

    if not _run(Demo(rollouts, output, overrides or ()).run()):
        raise typer.Exit(1)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the environment: letters a-z, digits and _.")],
) -> None:
    """Create a working environment in the current folder."""
    from nemo_gym_prorl.cli import environments

    for path in environments.create(name, Path.cwd()):
        print(path)
    print(f"Next steps: resources_servers/{name}/README.md")


@app.command()
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ENVIRONMENT... [OVERRIDE...]",
            help="Names of environments, shipped (`gym list environments`) or in this folder, and Hydra overrides "
            "for Gym (++key=value).",
        ),
    ],
    policy_model: Annotated[str, typer.Option(envvar="PRORL_MODEL_NAME", help="Name of the model at the endpoint.")],
    policy_url: Annotated[
        str | None,
        typer.Option(
            envvar="PRORL_MODEL_URL",
            help="URL of the inference endpoint, ending in /v1 (see `prorl scripted`). Leave it out if each "
            "training adds its own engines, as NeMo RL does with `rollouts: service`.",
        ),
    ] = None,
    policy_key: Annotated[str, typer.Option(envvar="PRORL_API_KEY", help="Key of the endpoint.")] = "none",
    tokenizer: Tokenizer = None,
    model_type: Annotated[str, typer.Option(help="Type of Gym's model server.")] = "prorl_model",
    head_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of Gym's head server, which lists the servers for clients.")
    ] = 11000,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the log. Default: a temporary folder, deleted at the end.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster, or `auto`. Runs a deployment on each node with the resource prorl_node, "
            "and a gateway to all of them at --head-port.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="With --ray: address on which the gateway listens.")] = "127.0.0.1",
    token: Token = None,
    keys_file: GatewayKeys = None,
    journal: GatewayJournal = None,
) -> None:
    """Serve environments until Ctrl-C, and restart dead servers."""
    from nemo_gym_prorl.cli.environments import check_extras

    # A missing package is reported before the slow imports below.
    check_extras([word for word in words if "=" not in word])

    from rich.console import Console

    from nemo_gym_prorl.cli import serve as command
    from nemo_gym_prorl.cli.serve import GatewayOptions

    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())  # servers have other working directories
    serving = command.serve(
        words,
        policy_url=policy_url,
        policy_model=policy_model,
        policy_key=policy_key,
        tokenizer=tokenizer,
        model_type=model_type,
        head_port=head_port,
        log_dir=log_dir,
        ray=ray,
        gateway=GatewayOptions(host, head_port, token, keys_file, journal),
        console=Console(highlight=False),
    )
    with contextlib.suppress(typer.Exit):  # Ctrl-C is the normal end, so the exit code is 0
        _run(serving)


@app.command()
def fleet(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="URLs of agents, as `prorl serve` prints them.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on; clients try 11000 first.")] = 11000,
    token: Token = None,
    keys_file: GatewayKeys = None,
    journal: GatewayJournal = None,
) -> None:
    """Serve several rollout services as one, until Ctrl-C.

    The gateway places rollouts on services with free slots, and restarts the rollouts of a lost service on another.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli import serve as command

    options = command.GatewayOptions(host, port, token, keys_file, journal)
    with contextlib.suppress(typer.Exit):  # Ctrl-C or SIGTERM is the normal end, so the exit code is 0
        _run(command.serve_gateway(urls, options, Console(highlight=False)))


@app.command()
def scripted(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")] = 0,
) -> None:
    """Run an inference endpoint that plays back the script in each row, without a language model. For tests."""
    from nemo_gym_prorl.cli.scripted.server import run

    with contextlib.suppress(typer.Exit):  # Ctrl-C is the normal end, so the exit code is 0
        _run(run(port))


@app.command()
def submit(
    rows: Annotated[Path, typer.Argument(help="JSONL file of Gym dataset rows; also a path that Gym resolves.")],
    url: Annotated[
        str | None,
        typer.Option(
            envvar="PRORL_URL",
            show_envvar=False,
            help="URL of the rollout service, or several separated by commas. Default: PRORL_URL, else the "
            "prorl_agent listed by Gym's head server.",
        ),
    ] = None,
    token: Token = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts per row; they form a group.")] = 1,
    run: Annotated[
        str | None,
        typer.Option(help="Name of the submission; ids are RUN-LINE-REPEAT. An existing name resumes it."),
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="Environment of all rows. Default: selected by each row's data_source.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSONL file to which results are appended. Rows with a result are skipped.")
    ] = None,
) -> None:
    """Submit rollouts, wait until they end, and print a report. Ctrl-C cancels the rollouts.

    Exit code 0: every rollout was scored. 1: a rollout was not scored, or a row was refused. 130, 143: interrupted.
    """
    from nemo_gym_prorl.cli.submit import SubmitOptions
    from nemo_gym_prorl.cli.submit import submit as submit_rows
    from nemo_gym_prorl.deployment.gym_cli import find_file
    from nemo_gym_prorl.failures import CallerError

    try:
        file = rows if rows.exists() else find_file(str(rows))
    except FileNotFoundError as error:
        raise CallerError(str(error), field="ROWS") from None
    options = SubmitOptions(file, repeats, run, environment, output)
    if not _run(submit_rows(options, url, token)):
        raise typer.Exit(1)


@app.command()
def show(
    rollout: Annotated[
        str,
        typer.Argument(
            help="Id of a rollout of the service, or a file of results: FILE or FILE:LINE.", metavar="ID|FILE"
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show a rollout: reward and failures, and once it has ended, input and turns."""
    from nemo_gym_prorl.cli import show as command

    def fetch(rollout_id: str) -> dict[str, Any]:
        from nemo_gym_prorl.cli import service

        return service.connect(url, token).rollout(rollout_id)

    command.show(rollout, fetch, full=full)


@app.command()
def view(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL file of results.")],
    bundle: Annotated[
        Path | None, typer.Option(help="Write a static site into this new folder instead of serving.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the viewer on 127.0.0.1.")] = 7575,
) -> None:
    """Show results in Inspect's log viewer until Ctrl-C. Requires: pip install 'nemo-gym-prorl\\[view]'."""
    from nemo_gym_prorl.cli import view as command

    command.view(results, bundle, port)


@app.command()
def status(
    rollout: Annotated[str | None, typer.Argument(help="Id of a rollout.")] = None,
    group: Annotated[str | None, typer.Option(help="List the rollouts of this group.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="List failed and retried rollouts with their failures.")
    ] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show the state of a service, of one rollout, or of several rollouts."""
    from nemo_gym_prorl.cli import service

    if rollout is not None:
        service.show_rollout(url, token, rollout)
    elif group is not None or failed:
        service.show_rollouts(url, token, group, failed)
    else:
        service.show_status(url, token)


@app.command()
def cancel(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts.")] = None,
    group: Annotated[str | None, typer.Option(help="Cancel all rollouts of this group.")] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Cancel rollouts and wait until their sandboxes are deleted. Exit code 1 if an id or the group is unknown."""
    from nemo_gym_prorl.cli import service

    if service.cancel(url, token, ids or [], group):
        raise typer.Exit(1)


@app.command()
def tail(
    after: Annotated[
        str | None, typer.Option(help="Start after this cursor, the first column of the output; 0 prints all.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Print only the rollouts of this group.")] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print state changes of rollouts as they happen, until Ctrl-C."""
    from nemo_gym_prorl.cli import service

    service.tail(url, token, after, group)


app.add_typer(backends_app)
app.add_typer(image_app)
app.add_typer(harness_app)
app.add_typer(data_app)
app.add_typer(key_app)


def main() -> None:
    from nemo_gym_prorl.failures import RolloutError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        app()
    except RolloutError as error:
        from nemo_gym_prorl.cli.show import visible

        sys.exit(f"prorl: {visible(error.reason)}")
    except Exception as error:
        from nemo_gym_prorl.http.problem_document import ApiError  # imports pydantic, which is slow

        if not isinstance(error, ApiError):
            raise
        sys.exit(f"prorl: {error}" + ("; set PRORL_TOKEN" if error.problem.status == 401 else ""))


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising SystemExit in the main thread, so that the command cleans up."""
    sys.exit(128 + number)


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous command. SIGINT and SIGTERM cancel the command; a second signal cancels the clean-up. The
    exit code of a cancelled command is 128 plus the signal's number."""
    import asyncio

    caught: signal.Signals | None = None

    async def interruptible() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def interrupt(number: signal.Signals) -> None:
            nonlocal caught
            caught = number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise typer.Exit(128 + (caught or signal.SIGTERM)) from None
