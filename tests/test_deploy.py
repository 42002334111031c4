"""deploy/: what it names is there, and the tools that will read it accept it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.server.config import ServerConfig
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed
from tests.tree import ROOT

DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:vllm|quire):[a-z0-9_]+")


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/dashboards/quire.json").read_text(encoding="utf-8"))


async def served_metrics() -> set[str]:
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        await api.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        text = (await api.http.get("/metrics")).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_every_metric_that_is_shown_or_alerted_on_is_served() -> None:
    shown = {
        name
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        for name in METRIC.findall(target["expr"])
    }
    rules = [rule["expr"] for group in read("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    alerted = {name for rule in rules for name in METRIC.findall(rule)}
    assert len(shown) > 12
    assert len(alerted) > 5
    assert shown | alerted <= await served_metrics()


def test_panels_are_whole_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_the_parts_find_each_other() -> None:
    services = read("compose.yaml")["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_dir(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to this machine alone"
    (target,) = read("prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}
    (provider,) = read("grafana/provisioning/dashboards/quire.yaml")["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])
    settings = {name for name in services["quire"]["environment"] if name.startswith("QUIRE_")}
    assert {name.removeprefix("QUIRE_").lower() for name in settings} <= set(ServerConfig.model_fields)


def test_promtool_accepts_configuration_and_rules() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here")
    done = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus/prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 rules found" in done.stdout


def test_promtool_agrees_when_alerts_fire(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here")
    cases = {
        "rule_files": [str(DEPLOY / "prometheus/rules.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": 'up{job="quire", instance="a"}', "values": "0x10"},
                    {"series": 'quire:engine_deaths_total{instance="a"}', "values": "0 0 1 1 1 1 1 1 1 1"},
                    {"series": 'vllm:num_requests_waiting{instance="a"}', "values": "40x20"},
                    {"series": 'vllm:num_requests_running{instance="a"}', "values": "4x20"},
                ],
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts}
                    for minute, name, alerts in (
                        (3, "QuireDown", [fired("critical", "a does not answer", job="quire")]),
                        (1, "QuireEngineDies", []),
                        (3, "QuireQueueLong", []),
                        (6, "QuireQueueLong", [fired("warning", "40 requests wait on a: more come than it can serve")]),
                    )
                ],
            }
        ],
    }
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(cases))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def fired(severity: str, summary: str, **labels: str) -> dict[str, Any]:
    return {"exp_labels": {"severity": severity, "instance": "a", **labels}, "exp_annotations": {"summary": summary}}


def test_every_kind_of_image_has_its_stages() -> None:
    """Whatever KIND and FLASH say, each stage is built from another or from an image; the default compiles nothing."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text.split("\nFROM ")[0], re.MULTILINE))
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE)
    names = {name for _, name in stages if name}
    assert defaults["FLASH"] == "none"
    for kind, flash in product(("cpu", "cuda"), ("none", "wheel", "build")):
        for source, _ in stages:
            source = source.replace("${KIND}", kind).replace("${FLASH}", flash).replace("${CUDA}", defaults["CUDA"])
            assert source in names or ":" in source, source
            assert "$" not in source
    for copied in re.findall(r"from=(\w+)", text):
        assert copied in names


def manifests(folder: str) -> Iterator[dict[str, Any]]:
    """The objects of one of deploy/kubernetes' folders, without what it patches in from another."""
    for path in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml")):
        if path.name not in ("kustomization.yaml", "adapter.yaml"):
            yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


async def test_a_pod_is_asked_what_the_server_answers() -> None:
    objects = {each["kind"]: each for each in manifests("cpu")}
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == port["name"]
            assert (await api.http.get(asked["path"])).status_code == 200
    settings = {each["name"].removeprefix("QUIRE_").lower() for each in container["env"] if "QUIRE_" in each["name"]}
    assert settings <= set(ServerConfig.model_fields)
    labels = pod["metadata"]["labels"].items()
    for selector in (objects["Deployment"]["spec"]["selector"]["matchLabels"], objects["Service"]["spec"]["selector"]):
        assert selector.items() <= labels
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + ServerConfig().shutdown_timeout
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"--uid {pod['spec']['securityContext']['runAsUser']} " in image
    assert f"QUIRE_PORT={port['containerPort']}\n" in image
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/models", "/tmp"}


@pytest.mark.parametrize("folder", ["cpu", "gpu", "autoscaled"])
def test_kubernetes_objects_are_what_their_schemas_say(folder: str) -> None:
    """As kustomize makes them, where it is installed, else as they are written."""
    schemas = pytest.importorskip("kubernetes_validate", reason="the registry's kubernetes-validate is not installed")
    objects = list(manifests(folder))
    if kustomize := shutil.which("kustomize"):
        command = [kustomize, "build", str(DEPLOY / "kubernetes" / folder)]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        objects = list(yaml.safe_load_all(built.stdout))
        assert {each["kind"] for each in objects} >= {each["kind"] for each in manifests("cpu")}
    for each in objects:
        if "monitoring.coreos.com" not in each["apiVersion"]:  # the operator's own, which Kubernetes does not know
            schemas.validate(each, schemas.latest_version(), strict=True)


def test_the_autoscaler_asks_for_what_the_adapter_serves() -> None:
    (scaler,) = (each for each in manifests("autoscaled") if each["kind"] == "HorizontalPodAutoscaler")
    (rule,) = read("kubernetes/autoscaled/adapter.yaml")["rules"]["custom"]
    series = rule["seriesQuery"].partition("{")[0]
    name = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), series)
    assert [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]] == [name]


def test_the_systemd_unit_is_one() -> None:
    unit = DEPLOY / "systemd/quire.service"
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd here")
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "/opt/quire/bin/quire is not executable" not in line]
    assert not told
