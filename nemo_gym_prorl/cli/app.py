# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command.

Thin: a command reads its arguments, calls the library, and prints. Modules are imported inside the command that needs
them, so that ``prorl --help`` does not wait for web frameworks that it will not use. An error of ours is one line and
exit code 1, without a traceback; anything else is a defect and shows one.
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

from nemo_gym_prorl.cli.app_data import app as data_app
from nemo_gym_prorl.cli.app_image import app as image_app
from nemo_gym_prorl.cli.app_key import app as key_app


app = typer.Typer(
    name="prorl",
    help="Rollouts as a service for NeMo Gym: staged, sandboxed, token-exact.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


Url = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_URL",
        show_envvar=False,
        help="The service. Default: PRORL_URL, else the prorl_agent that Gym's head server knows.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_TOKEN",
        show_envvar=False,
        help="The service's key. Better in PRORL_TOKEN: others can read command lines.",
    ),
]
FrontKeys = Annotated[
    Path | None, typer.Option("--keys-file", help="Of a front: clients with keys of their own, see prorl key.")
]
FrontJournal = Annotated[
    str | None,
    typer.Option(
        "--journal",
        help="Of a front: a folder on this machine's own disk, in which its rollouts outlive it.",
    ),
]


@app.command()
def setup() -> None:
    """Put everything that rollouts need into place: a container runtime and the default sandbox image.

    An image with IPython is built when a task needs it. What is there already is used as it is, so a second run takes
    no time. Nothing outside the cache folder is touched.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli.images import shown_step
    from nemo_gym_prorl.sandbox.images.builder import (
        DEFAULT,
        default_image_path,
        ensure_image,
        run_self_test,
    )
    from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime

    console = Console(highlight=False)
    with shown_step(console, "Container runtime") as say:
        runtime = ensure_runtime(say)
        say(f"{runtime.flavor} {runtime.version_text}, {runtime.path}")
    with shown_step(console, "Default sandbox image") as say:
        say(str(ensure_image(DEFAULT, say)))
    with shown_step(console, "A first container") as say:
        say(", ".join(run_self_test(default_image_path(), runtime).splitlines()))


@app.command()
def doctor(
    policy_url: Annotated[
        str | None, typer.Option(help="Check this inference endpoint instead of the machine: is it fit to train with?")
    ] = None,
    policy_model: Annotated[str, typer.Option(help="The model's name at the endpoint.")] = "",
    policy_key: Annotated[str, typer.Option(envvar="PRORL_API_KEY", help="Its bearer token.")] = "",
    tokenizer: Annotated[str | None, typer.Option(help="Folder or Hugging Face name of the tokenizer.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file that replaces the tokenizer's own.")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="vLLM's name; else found by the template.")] = None,
    engine: Annotated[
        Literal["vllm", "vllm_chat", "nemo_rl", "sglang"] | None, typer.Option(help="Protocol of the endpoint.")
    ] = None,
) -> None:
    """Show what is there, what is missing and how to get it. Exit code 1 if rollouts can't run."""
    from rich.console import Console

    from nemo_gym_prorl.cli import doctor as command

    asked: dict[str, object] | None = None
    if policy_url is not None:
        asked = {"base_url": [policy_url], "model": policy_model or tokenizer or "", "api_key": policy_key}
        asked |= {"tokenizer": tokenizer, "chat_template": chat_template, "engine": engine}
        asked["tool_call_parser"] = tool_call_parser
    if not command.show(Console(highlight=False), asked):
        raise typer.Exit(1)


@app.command()
def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hydra overrides for Gym, e.g. ++prorl_code_agent.responses_api_agents.prorl_agent.stages.run=4"
        ),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="How many rollouts.")] = 16,
    output: Annotated[Path, typer.Option(help="JSONL file for the finished rollouts.")] = Path("out/demo.jsonl"),
) -> None:
    """Run HumanEval rollouts in a real Gym deployment with real sandboxes, and watch them.

    The policy is scripted unless PRORL_MODEL_URL names an endpoint (PRORL_MODEL_NAME, PRORL_API_KEY). Exit code 1 if
    a rollout was not scored, or earned another reward than its script deserves.
    """
    from nemo_gym_prorl.cli.demo import Demo

    if not _run(Demo(rollouts, output, overrides or ()).run()):
        raise typer.Exit(1)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the environment: a-z, 0-9 and _.")],
) -> None:
    """Write an environment into this folder that serves and scores at once: server, configuration, rows, a test."""
    from nemo_gym_prorl.cli import new_environment

    for path in new_environment.create(name, Path.cwd()):
        print(path)
    print(f"What to run next is in resources_servers/{name}/README.md")


@app.command()
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ENVIRONMENT... [OVERRIDE...]",
            help="Names that `gym list environments` shows, and Hydra overrides for Gym (++key=value).",
        ),
    ],
    policy_model: Annotated[str, typer.Option(envvar="PRORL_MODEL_NAME", help="The model's name there.")],
    policy_url: Annotated[
        str | None,
        typer.Option(
            envvar="PRORL_MODEL_URL",
            help="The inference endpoint, ending in /v1; see prorl scripted. Without one: for runs that bring their "
            "own engines, as NeMo RL does with rollouts: service.",
        ),
    ] = None,
    policy_key: Annotated[str, typer.Option(envvar="PRORL_API_KEY", help="The endpoint's key.")] = "none",
    model_type: Annotated[str, typer.Option(help="Gym's model server.")] = "prorl_model",
    head_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of Gym's head server; where clients look first.")
    ] = 11000,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the log. Default: a temporary one.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster, or auto: on each node that has the resource prorl_node, with a front "
            "before them at --head-port.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="With --ray: where the front listens.")] = "127.0.0.1",
    token: Token = None,
    keys_file: FrontKeys = None,
    journal: FrontJournal = None,
) -> None:
    """Serve environments: agent, job API, model server; a server that dies is started again. Ctrl-C ends it."""
    from nemo_gym_prorl.cli.environments import check_extras

    # Before all else is imported, which takes seconds.
    check_extras([word for word in words if "=" not in word])

    from rich.console import Console

    from nemo_gym_prorl.cli import serve as command
    from nemo_gym_prorl.cli.fleet import FrontOptions

    serving = command.serve(
        words,
        policy_url=policy_url,
        policy_model=policy_model,
        policy_key=policy_key,
        model_type=model_type,
        head_port=head_port,
        log_dir=log_dir,
        ray=ray,
        front=FrontOptions(host, head_port, token, keys_file, journal),
        console=Console(highlight=False),
    )
    with contextlib.suppress(typer.Exit):  # an interrupt is its good end
        _run(serving)


@app.command()
def fleet(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Services, as prorl serve lists them.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port; where clients look first.")] = 11000,
    token: Token = None,
    keys_file: FrontKeys = None,
    journal: FrontJournal = None,
) -> None:
    """One service before several: rollouts go where there is room, and begin elsewhere if a node is lost."""
    from rich.console import Console

    from nemo_gym_prorl.cli import fleet as command

    with contextlib.suppress(typer.Exit):  # an interrupt is its good end
        _run(
            command.over_list(
                urls, command.FrontOptions(host, port, token, keys_file, journal), Console(highlight=False)
            )
        )


@app.command()
def scripted(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name to serve.")] = "prorl-scripted-policy",
    max_model_len: Annotated[int, typer.Option(min=1, help="Context window in tokens.")] = 262_144,
    latency_s: Annotated[float, typer.Option(min=0, help="Seconds per generation.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the log-probabilities.")] = 0,
) -> None:
    """Run a model server that plays back the answers that a row brings with it. No language model."""
    from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, run

    with contextlib.suppress(typer.Exit):  # an interrupt is its good end
        _run(run(ScriptedConfig(model, max_model_len, latency_s, seed), host, port))


@app.command()
def submit(
    rows: Annotated[Path, typer.Argument(help="JSONL file of Gym dataset rows; Gym's short names are known, too.")],
    url: Annotated[
        str | None,
        typer.Option(
            envvar="PRORL_URL",
            show_envvar=False,
            help="The service, or several with commas between. Default: PRORL_URL, else the prorl_agent that Gym's "
            "head server knows.",
        ),
    ] = None,
    token: Token = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts per row; they are one group.")] = 1,
    run: Annotated[
        str | None, typer.Option(help="Name of the run: ids are RUN-LINE-REPEAT. The same name again goes on with it.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="Environment of all rows; by default each goes where its data_source says.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="Name under which the service shares its slots fairly; by default a row's own.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first; by default a row's own.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSONL file for results, as they come. What is in it is not run again.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the ids, and leave.")] = False,
) -> None:
    """Submit rollouts and follow them to their end; interrupted, cancel them.

    Exit code 0: every rollout was scored; 1: one was not, or a row was refused; 130, 143: interrupted.
    """
    from nemo_gym_prorl.cli.submit import Order
    from nemo_gym_prorl.cli.submit import submit as submit_rows
    from nemo_gym_prorl.deployment.config_files import place_of
    from nemo_gym_prorl.failures import CallerError

    try:
        file = rows if rows.is_file() else place_of(str(rows))
    except FileNotFoundError as error:
        raise CallerError(str(error), field="ROWS") from None
    order = Order(file, repeats, run, environment, client, priority, output, detach)
    if not _run(submit_rows(order, url, token)):
        raise typer.Exit(1)


@app.command()
def show(
    rollout: Annotated[
        str, typer.Argument(help="A rollout's id, or FILE or FILE:LINE of results.", metavar="ID|FILE")
    ],
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show a rollout as a table: input, turns, reward, failures."""
    from nemo_gym_prorl.cli import show as command

    command.show(url, token, rollout, full=full, as_json=as_json)


@app.command()
def view(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL file of results.")],
    bundle: Annotated[Path | None, typer.Option(help="Make a static site in this new folder instead.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the viewer listens, on loopback.")] = 7575,
) -> None:
    """Look at rollouts in Inspect's log viewer, until Ctrl-C: pip install 'nemo-gym-prorl\\[view]'."""
    from nemo_gym_prorl.cli import view as command

    command.view(results, bundle, port)


@app.command()
def status(
    rollout: Annotated[str | None, typer.Argument(help="One rollout's id.")] = None,
    group: Annotated[str | None, typer.Option(help="The rollouts of this group.")] = None,
    state: Annotated[str | None, typer.Option(help="The rollouts in this state, e.g. running.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="The rollouts that failed, and why.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show the pools of a running service, one rollout, or those that fit."""
    from nemo_gym_prorl.cli import watch

    if rollout is not None:
        watch.show_rollout(url, token, rollout)
    elif group is not None or state is not None or failed:
        watch.show_rollouts(url, token, group=group, state=state, failed=failed)
    else:
        watch.show_status(url, token)


@app.command()
def cancel(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts.")] = None,
    group: Annotated[str | None, typer.Option(help="All rollouts of this group.")] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Cancel rollouts; returns when their sandboxes are gone. Exit code 1 if an id or the group is unknown."""
    from nemo_gym_prorl.cli import jobs

    if jobs.cancel(url, token, ids or [], group):
        raise typer.Exit(1)


@app.command()
def tail(
    after: Annotated[str | None, typer.Option(help="Cursor of the last transition seen; 0 for all.")] = None,
    group: Annotated[str | None, typer.Option(help="Only the rollouts of this group.")] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print every transition of every rollout as it happens."""
    from nemo_gym_prorl.cli import watch

    watch.tail(url, token, after, group)


backends_app = typer.Typer(name="backends", help="List, add and drain the inference engines of model servers.")
ModelUrl = Annotated[
    str | None,
    typer.Option(
        "--url", help="The model server, or several with commas. Default: those that Gym's head server knows."
    ),
]


@backends_app.callback(invoke_without_command=True)
def backends(context: typer.Context, url: ModelUrl = None, token: Token = None) -> None:
    """List the engines of model servers: health, rollouts, turns being sampled, label of the weights."""
    if context.invoked_subcommand is None:
        from nemo_gym_prorl.cli import jobs

        jobs.show_backends(url, token)


@backends_app.command("add")
def add_backend(
    engine: Annotated[str, typer.Argument(help="The engine's base URL.")],
    run: Annotated[str | None, typer.Option(help="For the rollouts of this run alone.")] = None,
    weight_version: Annotated[str | None, typer.Option(help="Label of its weights.")] = None,
    key: Annotated[str | None, typer.Option(envvar="PRORL_API_KEY", help="The engine's key.")] = None,
    url: ModelUrl = None,
    token: Token = None,
) -> None:
    """Place rollouts on one more engine."""
    from nemo_gym_prorl.cli import jobs

    jobs.add_backend(url, token, engine, run, weight_version, key)


@backends_app.command("drain")
def drain_backend(
    engine: Annotated[str, typer.Argument(help="The engine's address or id, as the list has them.")],
    url: ModelUrl = None,
    token: Token = None,
) -> None:
    """Place no new rollouts on an engine; those that it has go on."""
    from nemo_gym_prorl.cli import jobs

    jobs.drain_backend(url, token, engine)


app.add_typer(backends_app)
app.add_typer(image_app)
app.add_typer(data_app)
app.add_typer(key_app)


def main() -> None:
    """Entry point of the ``prorl`` script."""
    from nemo_gym_prorl.failures import RolloutError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        app()
    except RolloutError as error:
        sys.exit(f"prorl: {error.reason}")
    except Exception as error:
        from nemo_gym_prorl.http.problem_document import ApiError  # by pydantic, which takes long to import

        if not isinstance(error, ApiError):
            raise
        sys.exit(f"prorl: {error}" + ("; set PRORL_TOKEN" if error.problem.status == 401 else ""))


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End the command in its main thread, as an exception, so that it cleans up."""
    sys.exit(128 + number)


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous command to its end. SIGINT and SIGTERM cancel it, so that it can clean up; a second one ends
    that too."""
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
