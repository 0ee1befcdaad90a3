import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.index.front import IDLE_S, AllowedPackages, InstallBudget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_what_may_be_installed():
    packages = AllowedPackages((), blocked=frozenset({"bad"}))
    packages.check("good")
    with pytest.raises(AccessRefused, match="the package bad is blocked") as refused:
        packages.check("bad")
    shown = refused.value.as_dict()
    assert shown["code"] == "denied_by_policy"
    assert shown["rule"] == "package_managers.pip.blocked_packages: bad"
    assert refused.value.status == 403


def test_only_what_is_allowed():
    packages = AllowedPackages((), blocked=frozenset({"both"}), allowed=frozenset({"good", "both"}))
    packages.check("good")
    with pytest.raises(AccessRefused, match="not among those"):
        packages.check("other")
    with pytest.raises(AccessRefused, match="blocked"):
        packages.check("both")


def test_nothing_at_all():
    with pytest.raises(AccessRefused, match="may not install packages"):
        AllowedPackages((), enabled=False).check("good")


def test_each_file_counts_once_and_with_its_largest_size():
    budget = InstallBudget(Clock())
    budget.take("a", 10, 100)
    budget.take("a", 60, 100)
    budget.take("a", 20, 100)
    assert budget.taken == 60
    assert budget.fits("b", 40, 100)
    assert not budget.fits("b", 41, 100)
    with pytest.raises(
        AccessRefused, match="has taken 60 bytes; 41 bytes more is over the 100 bytes it may take"
    ) as refused:
        budget.take("b", 41, 100)
    assert refused.value.code == "limit_exceeded"
    assert not budget.has("b")
    budget.give_back("a")
    assert budget.taken == 0
    budget.take("a", 1 << 60, None)


def test_an_install_ends_after_a_pause():
    clock = Clock()
    budget = InstallBudget(clock)
    with budget.asking():
        budget.take("a", 10, None)
        clock.now += 10 * IDLE_S  # a long download is no pause
        with budget.asking():
            assert budget.taken == 10
    clock.now += IDLE_S - 1
    budget.keep()
    clock.now += IDLE_S - 1
    with budget.asking():
        assert budget.taken == 10
    clock.now += IDLE_S
    with budget.asking():
        assert budget.taken == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 100))), st.integers(0, 200))
def test_never_over_the_cap(takes, most):
    budget, sizes = InstallBudget(Clock()), {}
    for file, size in takes:
        others = sum(value for name, value in sizes.items() if name != file)
        if others + size <= most:
            budget.take(file, size, most)
            sizes[file] = max(size, sizes.get(file, 0))
        else:
            with pytest.raises(AccessRefused):
                budget.take(file, size, most)
        assert budget.taken == sum(sizes.values()) <= most
