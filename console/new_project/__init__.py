"""Files of a new project, which `nyala new` copies; they work as they are.

env      An environment of several turns: guess a number from 1 to 9 in four turns
rewards  Rewards of this run; `docs/rewards.md` lists the forms that a function may have
"""
