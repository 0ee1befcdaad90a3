"""`carrel doctor --kubernetes` on a real cluster."""

from __future__ import annotations

import os

from carrel.models import Check
from carrel.providers.kubernetes.access import find_access
from carrel.providers.kubernetes.api import KubernetesApi
from carrel.providers.kubernetes.examination import Examination


async def examined(ground, kubeconfig: str) -> dict[str, Check]:
    api = KubernetesApi(find_access(kubeconfig))
    try:
        return {check.name: check for check in await Examination(api, ground.options).run()}
    finally:
        await api.close()


async def test_an_administrator_sees_the_whole_cluster(ground) -> None:
    bound = ("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/workspaces", "-n", ground.name, "--timeout=60s")
    ground.cluster.kubectl(*bound)
    found = await examined(ground, os.environ["KUBECONFIG"])
    said = {name: (check.status, check.found) for name, check in found.items()}
    rights = said.pop("rights")
    assert rights[0] == "ok"
    assert said == {
        "Kubernetes": ("ok", "v1.34.4"),
        "agent-sandbox": ("ok", "v1beta1, with warm pools"),
        "Pod Security": ("ok", f"{ground.name} enforces restricted"),
        "network policies": (
            "degraded",
            "no controller that is known here; each pod tries to get out first, and does not start if it can",
        ),
        "volume": ("ok", "workspaces, 1Gi, ReadWriteMany"),
        "storage classes": ("degraded", "none"),
        "runtime classes": ("degraded", "gvisor (runsc)"),
        "user namespaces": ("degraded", "0 of 1 nodes"),
    }
    assert all(check.remedy for check in found.values() if check.status != "ok")
    missing = await examined(ground.with_options(gvisor_class="none", volume_claim="none"), os.environ["KUBECONFIG"])
    assert {name for name, check in missing.items() if check.status == "missing"} == {"runtime classes", "volume"}


async def test_a_server_learns_which_rights_it_lacks(ground) -> None:
    found = await examined(ground, ground.kubeconfig())
    assert (found["rights"].status, found["runtime classes"].found) == ("ok", "not known")
    elsewhere = await examined(ground.with_options(namespace="default"), ground.kubeconfig())
    assert elsewhere["rights"].status == "missing"
    assert elsewhere["rights"].found.startswith("lacks get pods, list pods, watch pods")


async def test_an_api_server_that_does_not_answer_is_the_only_line(ground) -> None:
    found = await examined(ground, ground.kubeconfig("https://127.0.0.1:1"))
    assert [(check.name, check.status) for check in found.values()] == [("Kubernetes", "missing")]
    assert "cannot be reached" in found["Kubernetes"].found
