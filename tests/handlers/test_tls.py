# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's second door, by TLS, as Gym serves the agent; and who believes its certificate."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from tests.handlers.gym_host import free_port
from tests.handlers.peers import ROW, deployment
from tests.rollout.command_line import prorl


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own for loopback; its key is beside it."""
    folder = tmp_path_factory.mktemp("tls")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=prorl", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


def settings(certificate: Path, **others: Any) -> dict[str, Any]:
    tls = {"tls_port": free_port(), "tls_cert": certificate, "tls_key": certificate.with_name("key.pem")}
    return {"control_token": "s3cret", **tls, **others}


async def test_a_rollout_by_tls_and_one_by_the_plain_address(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(certificate)
    async with deployment(**own) as at:
        url = f"https://127.0.0.1:{own['tls_port']}"
        async with RolloutClient(url, "s3cret") as stranger:
            with pytest.raises(InfrastructureError, match="certificate verify failed"):
                await stranger.status()
        monkeypatch.setenv("PRORL_CA", str(certificate))
        async with RolloutClient(url, "s3cret") as client, RolloutClient(at.url, "s3cret") as plain:
            job = await client.submit(ROW)
            assert (await client.wait(job.id)).reward == 1.0
            assert (await plain.get(job.id)).reward == 1.0
        async with RolloutClient(url) as nobody:
            with pytest.raises(ApiError, match="401"):
                await nobody.status()
        code, said = await prorl("status", url=url, PRORL_TOKEN="s3cret", PRORL_CA=str(certificate))
        assert (code, "succeeded" in said) == (0, True), said


@pytest.mark.parametrize(
    ("others", "field", "said"),
    [
        ({"tls_key": None}, "tls_port", "are needed together"),
        ({"tls_port": None, "tls_cert": None}, "tls_key", "are needed together"),
        ({"control_token": None}, "control_token", "would listen on all interfaces"),
        ({"tls_cert": Path(__file__)}, "tls_cert", "must be PEM, and belong together"),
        ({"tls_key": Path("/none.pem")}, "tls_cert", "must be PEM, and belong together"),
    ],
)
async def test_a_door_that_cannot_be_is_refused(
    certificate: Path, others: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(CallerError, match=said) as refused:
        async with deployment(**settings(certificate, **others)):
            pass
    assert refused.value.field == field


async def test_a_file_of_authorities_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (__file__, "/none.pem"):
        monkeypatch.setenv("PRORL_CA", file)
        with pytest.raises(CallerError, match="PRORL_CA"):
            async with RolloutClient("https://127.0.0.1:1"):
                pass
