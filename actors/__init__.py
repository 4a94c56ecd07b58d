"""Actors: engines, environments, rewards, the episode loop and the weight receiver.

__main__            Commands of an actor's process: sample or score for a run, or export
                    demonstrations
assembly            Assembly of an actor from settings: engine, tokenizer, environment, reward,
                    connections
capacity            The number of episodes that an actor has at a time, and the share of its time
                    that is work
chat                Chats: messages of prompts and episodes, and columns in their texts
demonstrations      Export of demonstrations for supervised training: text to tokens, with the
                    trained ones marked
engine/             Inference engines behind one protocol, vLLM and a small one in torch, and the
                    tokenizer
engine_of_settings  The engine of an actor, made from the settings of its run
environments/       Environments: prompts, steps and scores
episodes/           Episodes from lease to submission
loop                Episode loop of one actor
metrics_page        An actor's page of `/metrics`: what this incarnation samples, and how it gets
                    its weights
numbers             Numbers in texts: the value that a text states for certain
preemption          Preemption notices of the clouds: a drain before the machine is taken away
rewards/            Reward functions, each in a process of its own
sandbox/            Sandbox for programs that a model wrote
teacher             A teacher: it scores finished episodes with a model that this run does not train
tool_calls          Calls of tools in the text of a turn, in the forms in which families of models
                    write them
weights/            Weight versions: received, checked, given to the engine, and shared with other
                    actors
"""
