"""Figures of cards, from an `nvidia-smi` that stands for a machine with some."""

from configs.metrics import CARD_MEMORY, CARD_USE, Cards
from tests.configs.support.fake_smi import hide_driver, install_smi


def test_the_cards_that_a_process_sees_have_figures(monkeypatch, tmp_path):
    install_smi(monkeypatch, tmp_path, cards=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")

    values = Cards().values()

    assert values == {
        CARD_USE.name: {"0": 0.83, "2": 0.83},
        CARD_MEMORY.name: {"0": 2**30, "2": 2**30},
    }


def test_without_a_driver_there_is_nothing_to_show(monkeypatch, tmp_path):
    hide_driver(monkeypatch, tmp_path)

    assert Cards().values() == {}


def test_the_driver_is_not_asked_each_time(monkeypatch, tmp_path):
    install_smi(monkeypatch, tmp_path)
    cards = Cards()
    before = cards.values()

    (tmp_path / "nvidia-smi").unlink()

    assert cards.values() == before
