"""deploy/: what it names is there, and the tools that will read it accept it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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
