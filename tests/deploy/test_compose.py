"""docker-compose.yml as Compose itself reads it (no engine needed), held to what deploy/README.md promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"router", "controller", "cachemgr", "worker", "ledger"}
SERVERS = {"nats", "postgres", "gateway"}
ONE_SHOTS = {"secrets", "model", "migrate"}
WITH_MODEL = {"router", "worker"}
VARIANTS = {"plain": (), "modelled": ("-f", "docker-compose.yml", "-f", "deploy/compose/modelled.yaml")}


def rendered(*files: str, profile: str = "") -> dict[str, Any]:
    """The services, with every default in place and nothing of this machine's environment."""
    compose = Path(sys.executable).with_name("docker-compose")
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    argv = [compose, "--env-file", os.devnull, *files, "--profile", profile, "config", "--format", "json"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is not set" not in done.stderr, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module", params=list(VARIANTS))
def pool(request: pytest.FixtureRequest) -> dict[str, Any]:
    return rendered(*VARIANTS[request.param])


def test_the_whole_system_is_there() -> None:
    assert set(rendered()["services"]) == SERVICES | SERVERS | ONE_SHOTS


def test_who_verifies_is_started_by_name_only_and_has_the_memory() -> None:
    verify = rendered(profile="verify")["services"]["verify"]
    assert verify["entrypoint"] + verify["command"] == ["vertumnus", "verify", "--new", "--keep", "--json"]
    assert int(verify["mem_limit"]) == 3 * 1024**3
    assert set(verify["networks"]) == {"record"}
    assert verify["restart"] == "no"


def test_processes_that_the_command_spawns_do_not_run_it_again() -> None:
    written = (ROOT / "Dockerfile").read_text()
    script = re.search(r"printf '%s\\n' (.+) \\\n +> /usr/local/bin/vertumnus", written)
    assert script is not None
    assert [line.strip("'") for line in re.findall("'[^']*'", script[1])] == [
        "#!/usr/local/bin/python3",
        "from cli.main import app",
        'if __name__ == "__main__":',
        "    app()",
    ]


def test_a_modelled_pool_needs_no_model_and_no_torch() -> None:
    services = rendered(*VARIANTS["modelled"])["services"]
    assert set(services) == SERVICES | SERVERS | ONE_SHOTS - {"model"}
    assert {service["build"]["target"] for service in services.values() if "build" in service} == {"control"}


def test_nothing_runs_as_root_or_writes_its_image(pool: dict[str, Any]) -> None:
    for name, service in pool["services"].items():
        assert service.get("user") in {"10001:10001", "postgres"}, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name


def test_everything_is_bounded(pool: dict[str, Any]) -> None:
    for name, service in pool["services"].items():
        assert int(service["mem_limit"]) <= 8 * 2**30, name
        assert service["logging"]["options"]["max-size"], name


def test_what_stays_up_is_watched_and_restarted(pool: dict[str, Any]) -> None:
    for name in SERVICES | SERVERS:
        service = pool["services"][name]
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name
        assert service["stop_grace_period"], name
    for name in SERVICES:
        assert "/readyz" in pool["services"][name]["healthcheck"]["test"][-1], name
    for name in ONE_SHOTS & set(pool["services"]):
        assert pool["services"][name]["restart"] == "no", name


def test_images_are_pinned(pool: dict[str, Any]) -> None:
    for name, service in pool["services"].items():
        _, colon, tag = service["image"].partition(":")
        assert colon, f"{name}: a tag, or it is the latest"
        assert tag != "latest", name
    for name in SERVERS:
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?(-alpine)?", pool["services"][name]["image"].partition(":")[2]), name


def test_only_the_api_and_the_record_are_published_and_only_on_loopback(pool: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in pool["services"].items() if "ports" in service}
    assert set(published) == {"gateway", "ledger"}
    assert all(port["host_ip"] == "127.0.0.1" for ports in published.values() for port in ports)


def test_replicas_of_the_router_do_not_collide(pool: dict[str, Any]) -> None:
    router = pool["services"]["router"]
    assert "container_name" not in router
    assert "ports" not in router
    assert "$HOSTNAME" in router["entrypoint"][-1]


def test_the_gateway_finds_the_routers() -> None:
    config = (ROOT / "deploy/compose/haproxy.cfg").read_text()
    assert "router:8000 resolvers docker" in config
    assert "GET /readyz" in config
    assert "monitor fail if no_router" in config


def test_servers_are_out_of_reach_from_outside(pool: dict[str, Any]) -> None:
    assert pool["networks"]["pool"]["internal"] is True
    assert pool["networks"]["record"]["internal"] is True
    for name in (SERVERS | SERVICES) - {"gateway", "ledger"}:
        assert set(pool["services"][name]["networks"]) <= {"pool", "record"}, name
    # Serving does not depend on Postgres: those who serve cannot even reach it.
    assert {name for name, service in pool["services"].items() if "record" in (service.get("networks") or {})} == {
        "postgres",
        "migrate",
        "ledger",
    }
    assert "postgres" not in json.dumps({name: pool["services"][name]["depends_on"] for name in SERVICES - {"ledger"}})


def test_what_is_needed_first_is_waited_for(pool: dict[str, Any]) -> None:
    needs = {
        name: {needed: condition["condition"] for needed, condition in service.get("depends_on", {}).items()}
        for name, service in pool["services"].items()
    }
    for name in SERVICES:
        assert needs[name]["nats"] == "service_healthy", name
    for name in ("nats", "postgres"):
        assert needs[name] == {"secrets": "service_completed_successfully"}
    assert needs["migrate"] == {"postgres": "service_healthy"}
    assert needs["ledger"]["migrate"] == "service_completed_successfully"
    for name in WITH_MODEL if "model" in needs else ():
        assert needs[name]["model"] == "service_completed_successfully"


def test_no_secret_stands_in_the_configuration(pool: dict[str, Any]) -> None:
    for name, service in pool["services"].items():
        for variable, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|SECRET|KEY", variable):
                assert variable.endswith("_FILE"), f"{name}: {variable} holds a secret"
                assert value.startswith("/run/vertumnus/secrets/"), name
            assert not re.search(r"://[^/@]*:[^/@]*@", value or ""), f"{name}: {variable} holds a password"


def test_each_service_is_its_own_nats_user(pool: dict[str, Any]) -> None:
    for name in SERVICES:
        environment = pool["services"][name]["environment"]
        assert environment["VERTUMNUS_NATS_USER"] == name
        assert environment["VERTUMNUS_NATS_PASSWORD_FILE"] == f"/run/vertumnus/secrets/nats.{name}"


def test_every_variable_is_one_the_service_reads(pool: dict[str, Any]) -> None:
    """A misspelt variable would be ignored without a word."""
    for name in sorted(SERVICES):
        module = __import__(f"services.{name}.settings", fromlist=["settings"])
        [settings] = [
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        known = {f"VERTUMNUS_{field.upper()}" for field in settings.model_fields}
        given = {each for each in pool["services"][name]["environment"] if each.startswith("VERTUMNUS_")}
        assert given <= known | {"VERTUMNUS_INSTANCE"}, name


def test_the_images_are_built_as_the_project_promises() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "# syntax=" not in dockerfile
    assert "--mount" not in dockerfile
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[1:]
    finals = {stage.split()[2]: stage for stage in stages if "ENTRYPOINT" in stage}
    assert set(finals) == {"control", "worker", "model"}
    for name, stage in finals.items():
        assert "USER 10001:10001" in stage, name
    assert all("--constraint constraints.txt" in each for each in re.findall(r"pip install[^&\n]*", dockerfile))


def test_images_get_what_the_ignore_file_lets_through() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines, "an allow list: what is new stays out"
    assert all((ROOT / path).exists() for path in allowed)
    assert {"shared", "services", "cli", "migrations"} <= set(allowed)
