"""Checks of what the user brings to the loss: functions, and teachers."""

from __future__ import annotations

from configs.errors import SettingsError
from configs.settings import Settings
from configs.tables.algorithm import OF_FUNCTIONS, is_user_function
from console.run.user_files import with_value

from .model import check_model


def check_losses(settings: Settings) -> str:
    """Functions of the user in `algorithm` can be loaded, and have the gradient of a loss.

    Raises:
        SettingsError: One of them does not.
    """
    algorithm = settings.algorithm
    if not any(is_user_function(getattr(algorithm, kind)) for kind in OF_FUNCTIONS):
        return "of Nyala"
    from learner.algorithm.user_losses import load_user_losses  # noqa: PLC0415 - torch

    functions = load_user_losses(algorithm, max_policy_lag=settings.run.max_policy_lag)
    return ", ".join(f"algorithm.{kind} {getattr(algorithm, kind)}" for kind in functions)


def check_teacher(settings: Settings) -> str:
    """Each teacher can be opened, and has the tokenizer of the run's model.

    Raises:
        SettingsError: One cannot or has not, or `algorithm.teacher_prompt` cannot be used.
    """
    from learner.data.teachers import check_tokenizer, teacher_prompt_of  # noqa: PLC0415 - torch

    run, models = settings.run, [model for model in settings.algorithm.teachers if model]
    for model in models:
        try:
            check_model(with_value(settings, "run", "model", model).run)
        except SettingsError as error:
            raise SettingsError(str(error).replace("run.model", "algorithm.teacher")) from error
    if run.model == "init" and not (run.folder / "init").is_dir():
        return "compared with the character model once that is made"
    teacher_prompt_of(settings)
    same = [f"{model}: {check_tokenizer(run, model)}" for model in models]
    return "; ".join(same) or "the model that the run begins with"
