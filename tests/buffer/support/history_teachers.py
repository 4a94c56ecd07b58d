"""Teachers of a random history: they lease finished tasks, score them, and die in between.

S1: only scored records are trained. S2: a record is scored once.
"""

from __future__ import annotations

from buffer import operations
from buffer.operations.values import SubmitLine
from tests.buffer.support.history_actors import exchange
from tests.buffer.support.history_world import MAX_ATTEMPTS, SCORE, TTL_MS, Teacher, World


def score(world: World) -> None:
    """A teacher asks for finished tasks, or hands scores in; now and then it dies or fails."""
    teachers = world.teachers + (world.zombie_teachers if world.chance(0.4) else [])
    teacher = world.rng.choice(teachers)
    if world.rng.random() < 0.5:
        _lease(world, teacher)
    elif world.chance(0.1):
        _crash(world, teacher)
    elif world.chance(0.05):
        rows = [(task, fence, "infra", "bad") for task, (fence, _) in teacher.held.items()]
        fail = operations.fail(max_attempts=MAX_ATTEMPTS, failures=rows)
        exchange(world, fail, {task: fence for task, fence, *_ in rows})
        teacher.held.clear()
    else:
        _submit(world, teacher)


def _crash(world: World, teacher: Teacher) -> None:
    """Its successor begins; it may act again nevertheless."""
    for index, other in enumerate(world.teachers):
        if other is teacher:
            world.zombie_teachers = [*world.zombie_teachers[-2:], teacher]
            world.teachers[index] = Teacher(teacher.name, teacher.incarnation + "'")


def _lease(world: World, teacher: Teacher) -> None:
    n, name = world.rng.randint(1, 6), teacher.name
    call = operations.lease(
        teacher.incarnation, ttl_ms=TTL_MS, n=n, version=(0, 0), teacher=teacher.name
    )
    answer = world.store.run(call)
    if world.recovering:
        assert answer.status == "WAIT", f"8.6: LEASE answered {answer.status} while RECOVERING"
    for task in answer.tasks:
        highest = world.highest.get(task.task_id, 0)
        assert task.fence > highest, f"I8: task {task.task_id} was granted under an old fence"
        assert world.teacher_of(task.task_id) == name, f"S2: {name} was given {task.task_id}"
        (record,) = task.chunks
        assert record is not None, f"I10: the record of task {task.task_id} is not there to score"
        assert not record.endswith(SCORE), f"S2: task {task.task_id} is to be scored again"
        world.highest[task.task_id] = world.promises.holder[task.task_id] = task.fence
    if not world.chance(0.05):  # else the reply is lost, and the leases with it
        teacher.held |= {task.task_id: (task.fence, task.chunks[0]) for task in answer.tasks}


def _submit(world: World, teacher: Teacher) -> None:
    lines = [
        SubmitLine(task, fence, record + SCORE) for task, (fence, record) in teacher.held.items()
    ]
    fences = {line.task_id: line.fence for line in lines}
    for task, _ in exchange(world, operations.submit(lines), fences):
        del teacher.held[task]
