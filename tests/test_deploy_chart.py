"""deploy/helm and deploy/integrations: values reach the objects that they are for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from quire.server.config import ServerConfig
from tests.helm_chart import ChartError, rendered
from tests.test_deploy import DEPLOY, METRIC, built, manifests, read, served_metrics


def same_objects(chart: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chart's objects without what kustomize's lack: the label that tells releases apart, and the annotation that
    keeps downloads.
    """

    def cleaned(thing: Any) -> Any:
        if isinstance(thing, list):
            return [cleaned(each) for each in thing]
        if not isinstance(thing, dict):
            return thing
        kept = {key: cleaned(each) for key, each in thing.items() if key != "app.kubernetes.io/instance"}
        if kept.get("annotations") == {"helm.sh/resource-policy": "keep"}:
            del kept["annotations"]
        return kept

    return sorted((cleaned(each) for each in chart), key=lambda each: str(each["kind"]))


@pytest.mark.parametrize("folder", ["cpu", "gpu"])
def test_helm_chart_renders_same_objects_as_kustomize(folder: str) -> None:
    of_gpu = {"gpus": 1, "cpu": "4", "memory": "32Gi"} if folder == "gpu" else {}
    wanted = sorted(built(folder), key=lambda each: str(each["kind"]))
    assert same_objects(rendered(**of_gpu)) == wanted


def test_helm_values_reach_their_fields() -> None:
    storage = {"accessMode": "ReadWriteMany", "className": "nfs", "size": "1Ti"}
    chart = rendered(model='a"b', args=["--strict"], replicas=3, image="r/quire:1", secret="mine", storage=storage)
    objects = {each["kind"]: each for each in chart}
    deployment, claim = objects["Deployment"]["spec"], objects["PersistentVolumeClaim"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert (deployment["replicas"], container["image"], container["args"]) == (3, "r/quire:1", ["--strict"])
    assert {"name": "QUIRE_MODEL", "value": 'a"b'} in container["env"]
    assert {each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "valueFrom" in each} == {"mine"}
    assert claim == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Ti"}},
        "storageClassName": "nfs",
    }
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    gpus = {each["kind"]: each for each in rendered(gpus=1, storage=storage)}["Deployment"]["spec"]["strategy"]
    assert gpus["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_pod_with_several_gpus_gets_tp_flags_and_shared_memory() -> None:
    for gpus, engines, ranks in ((2, 1, 2), (8, 4, 2), (4, 4, 1)):
        objects = {each["kind"]: each for each in rendered(gpus=gpus, dataParallel=engines)}
        pod = objects["Deployment"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        settings = {each["name"]: each.get("value") for each in container["env"]}
        config = ServerConfig(
            tensor_parallel_size=int(settings["QUIRE_TENSOR_PARALLEL_SIZE"]),
            data_parallel_size=int(settings.get("QUIRE_DATA_PARALLEL_SIZE", 1)),
        )
        assert (config.tensor_parallel_size, config.data_parallel_size) == (ranks, engines)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    for one in (rendered(), rendered(gpus=1)):
        (pod,) = (each["spec"]["template"]["spec"] for each in one if each["kind"] == "Deployment")
        assert "shm" not in str(pod)
        assert "PARALLEL" not in str(pod)


def test_scheduling_and_extra_values_reach_pod() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
    values: dict[str, Any] = {
        "nodeSelector": {"disk": "ssd"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "imagePullSecrets": [{"name": "registry"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
    }
    added = {
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "certificates", "secret": {"secretName": "tls"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/tls"}],
        "podAnnotations": {"note": "one"},
        "podLabels": {"team": "a"},
        "kernels": {"size": "5Gi"},
        "dataDir": {"size": "9Gi"},
    }
    chart = rendered(gpus=1, **values, **added)
    objects = {each["kind"]: each for each in chart}
    template = objects["Deployment"]["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert {name: pod[name] for name in values} == values
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}, *added["tolerations"]]
    assert added["extraEnv"][0] in container["env"]
    assert added["extraVolumes"][0] in pod["volumes"]
    assert added["extraVolumeMounts"][0] in container["volumeMounts"]
    assert template["metadata"]["annotations"] == added["podAnnotations"]
    assert added["podLabels"].items() <= template["metadata"]["labels"].items()
    claims = {each["metadata"]["name"]: each["spec"] for each in chart if each["kind"] == "PersistentVolumeClaim"}
    assert claims["quire-kernels"]["resources"] == {"requests": {"storage": "5Gi"}}
    assert claims["quire-data"]["resources"] == {"requests": {"storage": "9Gi"}}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    settings = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert settings["QUIRE_DATA_DIR"] == mounts["data"]
    kept = [value for name, value in settings.items() if name.endswith("CACHE_DIR")]
    assert len(kept) == 4
    assert all(value.startswith(f"{mounts['kernels']}/") for value in kept)
    named = {name.removeprefix("QUIRE_").lower() for name in settings if name.startswith("QUIRE_")}
    assert named <= set(ServerConfig.model_fields)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"dataDir": {"size": "1Gi"}, "replicas": 2}, "dataDir: one pod only"),
        ({"gpus": 3, "dataParallel": 2}, "dataParallel: gpus must be a multiple"),
        ({"autoscaling": {"kind": "vpa"}}, "autoscaling.kind: none, hpa or keda"),
        ({"autoscaling": {"kind": "hpa"}}, "storage.accessMode must be ReadWriteMany"),
    ],
)
def test_helm_chart_rejects_impossible_values(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ChartError, match=re.escape(wrong)):
        rendered(**values)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
async def test_autoscaler_uses_existing_metric(kind: str) -> None:
    chart = rendered(autoscaling={"kind": kind, "maxReplicas": 3}, storage={"accessMode": "ReadWriteMany"}, gpus=1)
    objects = {each["kind"]: each for each in chart}
    deployment = objects["Deployment"]["spec"]
    assert "replicas" not in deployment, "they are the scaler's"
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0, "no card is spare"
    if kind == "hpa":
        (scaler,) = (each["spec"] for each in manifests("autoscaled") if each["kind"] == "HorizontalPodAutoscaler")
        assert objects["HorizontalPodAutoscaler"]["spec"] == scaler | {"maxReplicas": 3}
        return
    scaled = objects["ScaledObject"]["spec"]
    assert (scaled["scaleTargetRef"]["name"], scaled["maxReplicaCount"]) == ("quire", 3)
    (trigger,) = scaled["triggers"]
    assert set(METRIC.findall(trigger["metadata"]["query"])) <= await served_metrics()
    assert 'namespace="models",pod=~"quire-.*"' in trigger["metadata"]["query"]


def test_monitors_and_routes_match_services() -> None:
    chart = rendered(
        podMonitor={"enabled": True, "labels": {"release": "prometheus"}, "authorized": True},
        prometheusRule={"enabled": True, "labels": {"release": "prometheus"}},
        otlp={"endpoint": "http://collector:4317/v1/traces", "port": 4317},
        networkPolicy={"from": [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}], "egress": [{}]},
        httpRoute={"enabled": True, "parentRefs": [{"name": "front"}], "hostnames": ["llm.example.com"]},
    )
    objects = {each["kind"]: each for each in chart}
    monitor, rule = objects["PodMonitor"], objects["PrometheusRule"]
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "quire", "which the rules ask for"
    for each in (monitor, rule):
        assert each["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == read("prometheus/rules.yml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    asked = endpoint["authorization"]["credentials"]
    given = next(each for each in container["env"] if each["name"] == "QUIRE_METRICS_API_KEY")
    assert asked.items() <= given["valueFrom"]["secretKeyRef"].items()
    policy = objects["NetworkPolicy"]["spec"]
    peers = policy["ingress"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in peers
    assert {"namespaceSelector": {"matchLabels": {"gateway": "yes"}}} in peers
    assert policy["egress"][1:] == [{"ports": [{"port": 4317}]}, {}]
    assert {"name": "QUIRE_OTLP_TRACES_ENDPOINT", "value": "http://collector:4317/v1/traces"} in container["env"]
    route = objects["HTTPRoute"]["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "front"}], ["llm.example.com"])
    (backend,) = route["rules"][0]["backendRefs"]
    service = objects["Service"]
    assert (backend["name"], backend["port"]) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])


async def test_integrations_name_existing_objects() -> None:
    """The schemas were checked once, with the operators' own definitions: docs/deploy/integrations.md."""
    pool, route = yaml.safe_load_all((DEPLOY / "integrations/inference-pool.yaml").read_text(encoding="utf-8"))
    pod = next(each for each in rendered() if each["kind"] == "Deployment")["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"][0]["number"] == pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    asked = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert {f"vllm:{name}" for name in asked} <= await served_metrics(), "which endpoint pickers read"

    runtime, service = yaml.safe_load_all((DEPLOY / "integrations/kserve.yaml").read_text(encoding="utf-8"))
    (container,) = runtime["spec"]["containers"]
    flags = [each.partition("=")[0].removeprefix("--").replace("-", "_") for each in container["args"][1:]]
    assert set(flags) <= set(ServerConfig.model_fields)
    (port,) = (each.partition("=")[2] for each in container["args"] if each.startswith("--port="))
    asked_ports = {container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "readiness", "liveness")}
    assert asked_ports == {int(port)} == {each["containerPort"] for each in container["ports"]}
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]

    ray = yaml.safe_load((DEPLOY / "integrations/rayservice.yaml").read_text(encoding="utf-8"))["spec"]
    (application,), (own,) = (
        each["applications"] for each in (yaml.safe_load(ray["serveConfigV2"]), read("ray/serve.yaml"))
    )
    assert application["import_path"] == own["import_path"]
    assert [each["name"] for each in application["deployments"]] == [each["name"] for each in own["deployments"]]
    images = {
        container["image"]
        for group in (ray["rayClusterConfig"]["headGroupSpec"], *ray["rayClusterConfig"]["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    }
    assert len(images) == 1
    assert f"ray[serve]>={ray['rayClusterConfig']['rayVersion'].rpartition('.')[0]}," in (
        DEPLOY / "ray/requirements.txt"
    ).read_text(encoding="utf-8")
