# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's names for environments: their files agree with each other, and the mixture with the servers that it is of."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemo_gym.config_types import Domain
from nemo_gym.registry import discover_environments
from omegaconf import OmegaConf

from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.servers.task_server import TaskServerConfig
from tests.tasks.rows_file import write_rows


ENVIRONMENTS = Path("environments")
NAMES = sorted(path.name for path in ENVIRONMENTS.iterdir() if path.name.startswith("prorl_"))
MIXTURE = "prorl_mixture"


def merged(name: str) -> dict[str, Any]:
    """An environment's configuration, with those that it names."""
    own = OmegaConf.load(ENVIRONMENTS / name / "config.yaml")
    whole = OmegaConf.merge(*(OmegaConf.load(path) for path in own.pop("config_paths", [])), own)
    found = OmegaConf.to_container(whole)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_is_what_its_manifest_says(name: str) -> None:
    manifest, config = yaml.safe_load((ENVIRONMENTS / name / "manifest.yaml").read_text()), merged(name)
    assert manifest["name"] == name
    assert manifest["domain"] in [domain.value for domain in Domain]
    server = manifest["resources_server"]
    assert (server is None) == (name == MIXTURE)
    assert server is None or server in config[server]["resources_servers"]
    agents = {
        agent
        for block in config.values()
        if isinstance(block, dict)
        for agent in block.get("responses_api_agents", ())
    }
    assert agents == {manifest["agent_server"]}
    for dataset in manifest["datasets"]:
        assert dataset["type"] == "train" or Path(dataset["jsonl_fpath"]).is_file()
    readme = (ENVIRONMENTS / name / "README.md").read_text()
    assert f"--environment {name}" in readme
    assert "# Licensing information" in readme


@pytest.mark.parametrize("name", NAMES)
def test_gym_lists_an_environment_with_its_domain_and_description(name: str) -> None:
    by_manifest = not inspect.signature(discover_environments).parameters  # since Gym 0.7
    if by_manifest:
        entry, source = (
            discover_environments()[name],
            yaml.safe_load((ENVIRONMENTS / name / "manifest.yaml").read_text()),
        )
        assert entry.manifest_path is not None, "Gym does not take the manifest"
    elif name == MIXTURE:
        pytest.skip("older Gyms list a mixture with the text of its first server")
    else:
        entry = discover_environments(ENVIRONMENTS)[name]
        source = OmegaConf.load(f"resources_servers/{name}/configs/{name}.yaml")[name].resources_servers[name]
    assert (entry.domain, entry.description) == (source["domain"], source["description"])


def settings_of(config: dict[str, Any], server: str) -> dict[str, Any]:
    """As the server reads them, with what they leave out."""
    module = importlib.import_module(f"resources_servers.{server}.app")
    [model] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, TaskServerConfig) and value.__module__ == module.__name__
    ]
    read = model(name=server, port=1, **config[server]["resources_servers"][server]).model_dump()
    return read | {"sandbox_provider": config[read["sandbox_provider"]]}


@pytest.mark.parametrize("server", [name for name in NAMES if name != MIXTURE])
def test_in_the_mixture_a_server_is_set_as_it_is_alone(server: str) -> None:
    assert settings_of(merged(MIXTURE), server) == settings_of(merged(server), server)


def test_the_mixture_has_each_family_with_rows_and_a_share_of_its_own() -> None:
    agent = merged(MIXTURE)[MIXTURE]["responses_api_agents"]["prorl_agent"]
    for taken in ("entrypoint", "host", "model_server", "datasets"):
        del agent[taken]
    config = ServiceConfig.model_validate(agent)
    families = {f"prorl_{name}": environment for name, environment in config.environments.items()}
    assert {*families} == {*NAMES} - {MIXTURE}
    assert all(one.resources_server and one.resources_server.name == name for name, one in families.items())
    sources = [source for one in families.values() for source in one.data_sources]
    assert len({*sources}) == len(sources)
    assert config.stages.eval > len(families)


def test_the_mixtures_example_is_made_of_the_servers(tmp_path: Path) -> None:
    rows = [
        {**json.loads(line), "data_source": family}
        for family in ("code", "math", "stem")
        for line in Path(f"resources_servers/prorl_{family}/data/example.jsonl").read_text().splitlines()[:2]
    ]
    assert write_rows(tmp_path / "example.jsonl", rows) == 6
    assert (tmp_path / "example.jsonl").read_text() == (ENVIRONMENTS / MIXTURE / "data/example.jsonl").read_text()
