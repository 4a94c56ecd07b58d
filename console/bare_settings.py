"""Settings as other programs take them: `learner.lr=1e-4` alone, or `--learning_rate 1e-4`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.errors import SettingsError

SET = "--set"


def refuse_bare_settings(arguments: Sequence[str], flags: Mapping[str, bool]) -> None:
    """Refuse a setting without `--set`, and repeat it as it is written here.

    Args:
        arguments: Of a verb.
        flags: That the verb knows, and whether a value follows.

    Raises:
        SettingsError: There is one.
    """
    if SET not in flags:
        return
    for before, word, after in zip(
        ["", *arguments], arguments, [*arguments[1:], "VALUE"], strict=False
    ):
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--") and name not in flags
        is_hydra = bool(equals) and "." in name and not flags.get(before)
        if (is_flag or is_hydra) and (meant := _meant(name)):
            raise SettingsError(
                f"a setting must be given with {SET}, got {word}; write {SET} "
                f"{meant}={value or after}"
            )


def _meant(name: str) -> str | None:
    from configs.error_text import suggest  # noqa: PLC0415 - loads all settings

    return suggest(name.lstrip("-+").split("."))
