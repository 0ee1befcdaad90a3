"""The providers of this host, and the choice of one for a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from carrel.errors import InvalidRequest, ProviderUnavailable, Unsupported
from carrel.models import Trust
from carrel.providers.base import Capability, Provider
from carrel.providers.built_in import BUILT_IN, LEVELS
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.microvm.options import MicrovmOptions
from carrel.providers.namespace import NamespaceProvider
from carrel.providers.process import ProcessProvider
from carrel.providers.trust import RULES
from carrel.providers.zygotes import ZygoteClient

if TYPE_CHECKING:
    from carrel.spiffe.sandboxes import SandboxIdentities


def open_providers(
    run_dir: str,
    workspaces: str,
    *,
    allow_process: bool,
    shared: Mapping[str, str] = MappingProxyType({}),
    zygote: ZygoteClient | None = None,
    folder_roots: Sequence[str] = (),
    images: str = "",
    docker: str = "",
    gvisor: GvisorOptions | None = None,
    microvm: MicrovmOptions | None = None,
    kubernetes: KubernetesOptions | None = None,
    bundles: str = "",
    third_party: Sequence[str] | None = None,
    identities: SandboxIdentities | None = None,
) -> dict[str, Provider]:
    """Return the providers of this host, strongest first, and of those with one level the quickest; the process
    provider only if the operator allows it, gVisor, virtual machines and a cluster only with their options. Those of
    other packages come last, and only with `third_party`, the names that the operator lists.

    `shared` maps paths in every isolated sandbox to what is mounted there from the host. `zygote` is an optional
    client, with the same paths, whose namespace zygote is being started already. Folders below `folder_roots` can be
    workspaces. The roots of images are below the directory `images`; without it, no sandbox runs from an image.
    `docker` is the socket of a Docker daemon, `bundles` the directory for the supervisor's bundle; without it, no
    sandbox is a container. `identities` gives SPIFFE IDs to sandboxes on other machines; without them, none is a pod.
    """
    providers: list[Provider] = []
    cluster: list[Provider] = []
    if kubernetes is not None:
        from carrel.providers.kubernetes.provider import KubernetesProvider

        cluster = [KubernetesProvider(run_dir, kubernetes, identities)]
        if kubernetes.gvisor_class:
            cluster.append(KubernetesProvider(run_dir, kubernetes, identities, gvisor=True))
    if microvm is not None:
        from carrel.providers.microvm.provider import MicrovmProvider

        providers.append(MicrovmProvider(run_dir, shared, options=microvm, bundles=bundles, images=images))
    if gvisor is not None:
        from carrel.providers.gvisor.provider import GvisorProvider  # `carrel run` starts faster without it

        providers.append(GvisorProvider(run_dir, shared, options=gvisor, bundles=bundles, images=images))
    providers += cluster[1:]
    providers.append(NamespaceProvider(run_dir, workspaces, shared, zygote, folder_roots, images))
    if docker:
        from carrel.providers.docker import DockerProvider

        providers.append(DockerProvider(run_dir, bundles, socket_path=docker, shared=shared, images=images))
    providers += cluster[:1]
    if allow_process:
        providers.append(ProcessProvider(run_dir, workspaces))
    if third_party is not None:
        from carrel.providers.third_party import open_third_party

        providers += open_third_party(
            run_dir, third_party, shared=shared, images=images, bundles=bundles, identities=identities
        )
    return {provider.name: provider for provider in providers}


def believed_level(provider: Provider, listed: Collection[str]) -> int:
    """Return the isolation level that counts. What a third-party provider says of itself is believed only if the
    operator lists it, because carrel cannot check it.
    """
    return provider.isolation_level if provider.name in BUILT_IN or provider.name in listed else 0


def choose(
    providers: dict[str, Provider],
    name: str,
    trust: Trust,
    needs: Callable[[Provider], Collection[Capability]] = lambda _: (),
    least: int = 0,
    listed: Collection[str] = (),
) -> Provider:
    """Return the provider of that name; for `auto` the strongest available one that satisfies the trust level and can
    do what is needed. If none of those that satisfy it can, the error names what the strongest of them lacks. `least`
    is the lowest level that `auto` may choose besides: that of a session which has run before. `listed` are the
    third-party providers that the operator lists; `auto` chooses no others of them.
    """
    least = max(least if name == "auto" else 0, RULES[trust].least_level)
    if name != "auto":
        provider = providers.get(name)
        if provider is None:
            if name == "process":
                raise Unsupported(
                    "the process provider does not isolate and is switched off",
                    field="provider",
                    hint="set CARREL_SANDBOX_ALLOW_PROCESS=true on the server, only for code you would run by hand",
                )
            raise InvalidRequest(
                f"unknown provider '{name[:64]}'",
                field="provider",
                hint=f"known here: auto, {', '.join(providers)}",
            )
        missing = provider.missing()
        if provider.isolation_level < least and (missing is None or name in BUILT_IN):
            raise Unsupported(
                f"provider '{name}' gives {LEVELS[provider.isolation_level]}, too little for trust '{trust}'",
                field="provider",
                hint=f"trust '{trust}' needs at least level {least}: {LEVELS[least]}",
            )
        if missing is not None:
            raise ProviderUnavailable(
                f"provider '{name}' cannot be used here: {missing}", field="provider", hint="run `carrel doctor`"
            )
        if believed_level(provider, listed) < least:
            raise Unsupported(
                f"carrel does not check the isolation of the third-party provider '{name}', so it is not used for "
                f"trust '{trust}'",
                field="provider",
                hint="name trust 'high', or let the operator list the provider in CARREL_SANDBOX_THIRD_PARTY",
            )
        return provider
    reasons = []
    unfit: Provider | None = None
    for provider in sorted(providers.values(), key=lambda known: -known.isolation_level):
        if provider.name not in BUILT_IN and provider.name not in listed:
            reasons.append(f"{provider.name} is a third-party provider that the operator does not list")
        elif provider.isolation_level < least:
            reasons.append(f"{provider.name} gives {LEVELS[provider.isolation_level]}")
        elif (missing := provider.missing()) is not None:
            reasons.append(f"{provider.name}: {missing}")
        elif provider.unsafe and trust is not Trust.HIGH:
            reasons.append(f"{provider.name} does not isolate")
        elif set(needs(provider)) <= provider.capabilities():
            return provider
        else:
            unfit = unfit or provider
    if unfit is not None:
        unfit.require(*needs(unfit))
    raise ProviderUnavailable(
        f"no provider on this host gives trust '{trust}' what it needs ({LEVELS[least]}): {'; '.join(reasons)}",
        field="trust",
        hint="run `carrel doctor` to see what is missing, or ask for a higher trust if you know the code",
    )
