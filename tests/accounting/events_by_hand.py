"""Events made by hand, so that these tests do not depend on any mechanism."""

from dpfedexp.accounting import GaussianEvent, Query, Sampling


def central(z: float, *, rate=1.0, kind="poisson", adjacency="replace-one", clip=1.0) -> GaussianEvent:
    """DP-FedAvg's round: noise of standard deviation zC on the sum."""
    both = 2.0 if adjacency == "replace-one" else 1.0
    sampling = Sampling() if rate == 1.0 else Sampling(kind, rate)  # type: ignore[arg-type]
    update = Query("update", clip, both * clip, z * clip, diameter=2.0 * clip)
    return GaussianEvent("central", adjacency, (update,), sampling, attained=True)  # type: ignore[arg-type]


def local(z: float, clip: float = 1.0) -> GaussianEvent:
    update = Query("update", clip, 2.0 * clip, z * clip, diameter=2.0 * clip)
    return GaussianEvent("local", "replace-one", (update,), attained=True, beyond_sum="nothing")
