"""Functions of the user in `algorithm`: found by file or by package, and trained with like ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import SettingsError
from configs.settings import AlgorithmSettings
from configs.tables.algorithm import is_user_function
from learner.algorithm import user_losses
from learner.algorithm.advantages import ADVANTAGES, WHITENED_BY, BatchRewards, estimate
from learner.algorithm.catalogue import packaged_entries
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.losses import PolicyLoss, is_sum_over_tokens, policy_loss
from learner.algorithm.surrogates import SURROGATES, WITH_RATIO_BOUND
from learner.algorithm.user_losses import group_of, register_user_losses
from tests.learner.support.made_tokens import make_prepared
from tests.learner.support.user_losses import copy_function, write_functions

LENGTHS = (3, 1, 5, 2)
TOKENS = sum(LENGTHS)
BOUNDS = {"mask_low": 0.6, "mask_high": 1.7, "geo_low": 0.9, "geo_high": 1.2, "veto": 0.5}


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves a function in the registries, or a folder in the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for registry in user_losses.REGISTRIES.values():
        for name in filter(is_user_function, [*registry]):
            del registry[name]
    WITH_RATIO_BOUND.intersection_update({"m2po"})


def _settings(**chosen: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(BOUNDS | chosen)


def _register(**chosen: Any) -> AlgorithmSettings:
    settings = _settings(**chosen)
    assert register_user_losses(settings, max_policy_lag=2)
    return settings


def _loss(settings: AlgorithmSettings) -> tuple[PolicyLoss, torch.Tensor]:
    """The loss of made-up tokens, and its gradient."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn((4, TOKENS), generator=generator, dtype=torch.float64)
    log_pi_N = (-1.5 + 0.4 * noise[0]).requires_grad_()
    prepared = make_prepared(
        log_pi_N.detach() + 0.4 * noise[1],
        noise[2],
        torch.full((TOKENS,), 1 / TOKENS, dtype=torch.float64),
        lengths=LENGTHS,
        log_prox_N=log_pi_N.detach() + 0.2 * noise[3],
        log_ratio_bound=0.3,
    )
    found = policy_loss(log_pi_N, torch.zeros_like(log_pi_N), prepared, settings)
    (gradient_N,) = torch.autograd.grad(found.loss, log_pi_N)
    return found, gradient_N


def _assert_same_loss(ours: AlgorithmSettings, copied: AlgorithmSettings) -> None:
    (found, gradient_N), (expected, expected_N) = _loss(copied), _loss(ours)
    assert found.loss.equal(expected.loss)
    assert gradient_N.equal(expected_N)
    assert gradient_N.any()
    for mask in ("kept_N", "low_N", "high_N"):
        assert getattr(found, mask).equal(getattr(expected, mask))


@pytest.mark.parametrize("name", SURROGATES)
def test_a_copy_of_a_surrogate_has_its_loss(name: str, tmp_path: Path) -> None:
    copied = copy_function(SURROGATES[name], tmp_path / "mine.py")
    ours = _settings(surrogate=name, correction="none")
    bounds = {"clip_low": ours.clip_low, "clip_high": ours.clip_high, "dual_clip": ours.dual_clip}

    settings = _register(surrogate=copied, correction="none", **bounds)

    _assert_same_loss(ours, settings)
    assert (copied in WITH_RATIO_BOUND) == (name == "m2po"), "whether the bound is computed"


@pytest.mark.parametrize(
    ("name", "proximal"),
    [
        *product(CORRECTIONS, ["behaviour"]),
        *product(sorted({*CORRECTIONS} - {"none"}), ["recomputed"]),
    ],
)
def test_a_copy_of_a_correction_has_its_loss(name: str, proximal: str, tmp_path: Path) -> None:
    copied = copy_function(CORRECTIONS[name], tmp_path / "mine.py")
    others = {"surrogate": "reinforce", "proximal": proximal}

    settings = _register(correction=copied, **others)

    _assert_same_loss(_settings(correction=name, **others), settings)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"none"}))
def test_a_copy_of_an_advantage_has_its_values(name: str, tmp_path: Path) -> None:
    copied = copy_function(ADVANTAGES[name], tmp_path / "mine.py")
    rewards_E = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 2.0])
    lengths_E = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    outcomes = BatchRewards(rewards_E, lengths_E, np.array([0, 0, 0, 0, 1, 1, 2]))
    whiten = WHITENED_BY.get(name, "none")

    settings = _register(advantage=copied, whiten=whiten, pass_k=2)

    expected_E = estimate(outcomes, _settings(advantage=name, pass_k=2))
    assert np.array_equal(estimate(outcomes, settings), expected_E)


def test_a_function_of_the_user_takes_two_passes_of_the_output_layer(tmp_path: Path) -> None:
    copied = copy_function(SURROGATES["clip"], tmp_path / "mine.py")

    assert not is_sum_over_tokens(_register(surrogate=copied))


def test_what_is_registered_is_named_with_the_hash_of_its_file(tmp_path: Path) -> None:
    copied = copy_function(SURROGATES["clip"], tmp_path / "mine.py")
    settings = _settings(surrogate=copied)

    before = register_user_losses(settings, max_policy_lag=2)
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# changed")
    after = register_user_losses(settings, max_policy_lag=2)

    assert before[0].startswith(f"algorithm.surrogate: {copied}, ")
    assert before != after


def test_parameters_reach_the_function(tmp_path: Path) -> None:
    path = write_functions(
        tmp_path / "mine.py",
        """
        def scaled(outcomes, settings):
            return settings.parameters["scale"] * outcomes.rewards_E
        """,
    )
    outcomes = BatchRewards(np.array([1.0, 0.0]), np.ones(2), np.zeros(2, dtype=np.int64))

    settings = _register(advantage=f"{path}:scaled", parameters={"scale": 3})

    assert estimate(outcomes, settings).tolist() == [3, 0]
    with pytest.raises(SettingsError, match=r"got '.*:scaled', which raises KeyError: 'scale', at"):
        _register(advantage=f"{path}:scaled")


# --------------------------------------------------------------------------------------------------
# Functions of an installed package.


def _install(folder: Path, entry_points: str, source: str) -> None:
    """Install a package `tiny-losses` into a folder, as pip leaves it, and put it on the path."""
    write_functions(folder / "tiny_losses.py", source)
    info = folder / "tiny_losses-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-losses\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    sys.path.append(str(folder))


@pytest.fixture
def package(tmp_path: Path) -> Iterator[None]:
    _install(
        tmp_path,
        f"[{group_of('surrogate')}]\nplain = tiny_losses:plain\nlost = tiny_losses:lost\n"
        f"[{group_of('advantage')}]\nhalf = tiny_losses:half\n"
        f"[{group_of('correction')}]\nnumber = tiny_losses:number\n",
        '''
        number = 3

        def plain(terms, settings):
            """Weigh the policy gradient with the ratio.

            Formula:
                S = r A

            Use:
                Tests.
            """
            never_N = torch.zeros_like(terms.log_ratios_N, dtype=torch.bool)
            return Objective(
                terms.log_ratios_N.exp() * terms.advantages_N, lambda: (never_N, never_N)
            )

        def half(outcomes, settings):
            return outcomes.rewards_E / 2
        ''',
    )
    yield
    sys.modules.pop("tiny_losses", None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["tiny-losses/plain", "Tiny_Losses/plain"])
def test_a_surrogate_of_an_installed_package_is_trained_with(name: str) -> None:
    settings = _register(surrogate=name, advantage="tiny-losses/half", correction="none")

    _assert_same_loss(_settings(surrogate="reinforce", correction="none"), settings)
    outcomes = BatchRewards(np.array([1.0, 0.0]), np.ones(2), np.zeros(2, dtype=np.int64))
    assert estimate(outcomes, settings).tolist() == [0.5, 0]


@pytest.mark.usefixtures("package")
def test_functions_of_installed_packages_are_described_with_their_sections() -> None:
    described = {(entry.setting, entry.name): entry for entry in packaged_entries()}

    plain = described["algorithm.surrogate", "tiny-losses/plain"]
    assert (plain.formula, plain.use) == ("S = r A", "Tests.")
    assert plain.summary == "Weigh the policy gradient with the ratio."
    assert described["algorithm.advantage", "tiny-losses/half"].formula == ""
    lost = described["algorithm.surrogate", "tiny-losses/lost"].summary
    assert "algorithm.surrogate must be importable, got 'tiny-losses/lost'" in lost


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (
            {"surrogate": "tiny-losses/soft"},
            "under nyala.losses.surrogate, got 'tiny-losses/soft'; registered are tiny-losses/lost",
        ),
        (
            {"surrogate": "other/x"},
            "tiny-losses/plain: install other beside the learner",
        ),
        ({"correction": "other/soft"}, "got 'other/soft'; registered are tiny-losses/number"),
        ({"surrogate": "tiny-losses/lost"}, "must be importable, .*which is tiny_losses:lost"),
        ({"correction": "tiny-losses/number"}, "must be a function, .*which is 3; correct"),
    ],
)
def test_what_no_package_has_is_refused(chosen: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        register_user_losses(_settings(**chosen), max_policy_lag=2)


def test_a_name_of_neither_form_is_refused_with_the_names_of_ours() -> None:
    for name in ("clpi", "mine.py", "folder/mine.py", "a b:c d"):
        with pytest.raises(ValueError, match="Input should be 'clip', 'reinforce'"):
            _settings(surrogate=name)
