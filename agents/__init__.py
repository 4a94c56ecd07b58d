"""Agents: the host that starts them, and the door through which they ask the run's model.

__main__      `python -m agents --config runs/x/config.yaml`: host agents of one run until it ends
answers       Answers to agents: completions whole and streamed, tokens, and errors, in OpenAI's
              forms
call_log      Calls of a conversation: what is stored of each, and which of them a request joins
conversation  One conversation of an agent at its host: calls under way, replies, rewards, and its
              end
door          The door: an HTTP server beside the agents, with OpenAI's routes for each conversation
host          Host of agents: takes conversations of a run, starts an agent for each, and serves
              their door
keeper        Keeper of one agent: a program that starts it, and ends all its processes when the
              host is gone
process       The process of an agent: its command, environment, limits, and the end of its output
requests      Requests of agents: read, refused where a run cannot do what they ask, and made into
              calls
"""
