"""Files that a newcomer enters on four journeys: `python -m benchmarks.journeys`.

    episode         from its task to its gradient
    weight_version  from an optimizer step to the next token that is sampled with it
    max_policy_lag  `run.max_policy_lag`, from the YAML file to every place that decides by it
    reward_mean     from its computation to Prometheus

`--walk NAME` prints one of them as a tour, with file and line of each step; `--at COMMIT` reads
another commit in place of this checkout. The lists below hold what a reader has to open who follows
the default settings by hand, both engines and a reward function of the user's included. Log lines,
settings tables, errors that are only raised and classes that only hold values are left out. So is
what an earlier journey has shown: how an operation runs in Redis, how a message reaches the broker.

Arms are the commit before the modules became chapters, and now. Both count the same functions: what
was also on the way then, and is gone, is not counted, and what was not there yet is named as
missing, so the first arm is a lower bound. One JSON object comes last; its ratios are files before
over files now, and `tree` in each arm is the size of the rooms without the laboratory.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.support.machine import REPOSITORY, describe_machine
from tests.packaging.moved_modules import PARTS, RENAMED

ROOMS = ("configs", "buffer", "broker", "actors", "learner", "console")
LABORATORY = "console/chaos/"  # as it was called then
SMALL = 60
BEFORE = "e615076"
WAS = {
    "actors.environments.calls:LaneThread._serve": (
        "actors.episodes.environment_threads:EnvironmentThreads._serve"
    ),
    "learner.reporting.figures:FIGURES": "learner.reporting.metrics_page:OF_LAST_BATCH",
}
"""Steps that had another name then, in another module."""
NAMED = {
    "Broadcast.freeze_members": "Broadcast.begin",
    "CachedRequest.append_token": "Row.take",
    "ConcurrencyLimit": "Room",
    "DeltaInbox.put_deltas": "DeltaInbox.put",
    "EnvironmentWorkers.submit_work": "EnvironmentWorkers.put",
    "EpisodeMaker.begin_episode": "EpisodeMaker.begin",
    "LogitChunk.differentiate": "Chunk.differentiate",
    "LogitChunk.statistics": "Chunk.statistics",
    "PipelinedConnection.execute_commands": "PipelinedConnection.ask",
    "RequestLane.offer": "Lane.offer",
    "RewardCaller.judge": "Caller.judge",
    "Rollout.append_delta": "Rollout.take",
    "Sampling.begin_episodes": "Sampling.begin",
    "Scoring.put_episode": "Scoring.put",
    "SequenceSplit": "Cut",
    "Sequences.from_token_ids": "Sequences.of",
    "WeightEpochs.begin_epoch": "WeightEpochs.begin",
    "WeightSlots.acquire": "Slots.acquire",
    "WeightSlots.seal": "Slots.seal",
    "WeightSources.choose_sources": "WeightSources.of",
    "_FiguresCollector.collect": "_Page.collect",
}
"""Classes and methods by their qualified names: now -> then."""

EPISODE = """
# The learner makes a task
learner.data.curriculum:Feeder.feed  creates the groups that are missing, in a thread of rank 0
learner.data.curriculum:units_to_create  decides how many, by the counts of the store
learner.data.ledger:Ledger.create  notes the groups first, so that a lost store can be mended
learner.data.curriculum:training_tasks  makes a task for each member of a group
learner.data.curriculum:training_task  derives the spec from the run's seed and the task's id
broker.protocol.codec:encode_spec  writes it as bytes that nobody reads before the actor
buffer.operations.tasks:create  the operation, as a value that any store can run
buffer.operations.operation:sliced  cuts it into calls of one script
learner.data.retrying_store:RetryingStore.run  repeats it while Redis is away
buffer.store:Store.run  asks for one reply after another
buffer.operations.operation:Operation.carry_out  goes from call to call, and makes a value of them
buffer.store:Store._ask  sends a script by its hash, or whole where Redis does not know it
buffer.client.scripts:load_script  finds it by its name, the file's stem in buffer/lua
buffer.client.scripts:assemble  puts it behind the libraries that it includes
buffer/lua/tasks/create.lua  adds new groups to those that wait
buffer/lua/lib/keys.lua  has the names of all keys

# An actor leases it
actors.loop:ActorLoop._lease  asks for as many tasks as there is room for
actors.capacity:ConcurrencyLimit  says how many episodes at a time
actors.loop:ActorLoop._ask  holds the leases as soon as they come
broker.client:BrokerClient.lease  names the requests that it gave up
broker.client:BrokerClient._call  numbers the request, and bounds its time
broker.protocol.codec:encode  writes the frame
broker.client:BrokerClient._until_answered  sends it again until it is answered
broker.connection:Connection.send  hands it to ZeroMQ
broker.transport.sockets:Router.receive  reads it in the broker
broker.server.dispatch:Dispatcher._read  notes a sign of life, and gives the request a lane
broker.protocol.codec:header_of  reads sender and kind, before anything is decoded
broker.transport.allow_list:AllowList.member  finds whose key it is
broker.server.liveness:Liveness.observe  finds the actor
broker.server.flow_control:RequestLimiter.admit  refuses it where its key has its share
broker.server.lanes:RequestLane.offer  starts it, or lets it wait its turn
broker.server.dispatch:Dispatcher._request  decodes and answers it in a task of its own
broker.protocol.codec:decode  reads and checks the frame
broker.server.validation:check_permission  checks what the key may ask
broker.server.service:Service._answer  tells requests apart
broker.server.validation:check_lease  checks its numbers
broker.server.leasing:Leasing.grant  the first half of a LEASE: one try at once
broker.server.leasing:Leasing._try  grants each request once
buffer.operations.leases:lease  the operation
buffer.store:AsyncStore._evaluate  the store for an event loop
buffer.client.connection:PipelinedConnection.execute_commands  sends it behind those under way
buffer/lua/leases/lease.lua  picks tasks that are ready, then begins new groups
buffer/lua/lib/units.lua  the life of a group
buffer/lua/lib/tasks.lua  the life of a task
buffer.operations.operation:parse_lease  reads the reply
broker.server.leasing:Leasing._fit  keeps what one message holds
broker.server.dispatch:Dispatcher._answer_lease  lets a request without work wait
broker.server.leasing:Leasing.wait  the second half: tries again when it is its turn
broker.server.dispatch:Dispatcher._send  writes the reply
broker.server.flow_control:ReplyLimiter.allows  bounds what a peer has yet to read
broker.client:BrokerClient._receive  passes it to the call that waits
actors.episodes.sampling:Sampling.hold  takes the leases
actors.episodes.held_leases:HeldLeases.hold  keeps each alive by heartbeats from now on

# The environment asks its question
actors.episodes.sampling:Sampling.begin_episodes  has the environment begin each episode
configs.tables.environments:Mixture.training  finds environment and item
actors.episodes.environment_workers:EnvironmentWorkers.submit_work  takes a call, and what follows
actors.environments.calls:LaneThread._serve  makes the call in a thread
actors.environments.calls:drive  does the work of a coroutine there
actors.episodes.maker:EpisodeMaker.begin_episode  begins, or continues the tokens of earlier leases
actors.environments.calls:call  awaits a method, or calls it
actors.environments.base:Environment  what every environment has
actors.environments.reasoning_gym:ReasoningGym.begin  makes the item of the default environment
actors.chat:read_prompt  checks text or messages
actors.engine.tokenizer:ModelTokenizer.encode_prompt  makes tokens of the prompt
actors.episodes.rollout:Rollout  the episode in the making
actors.episodes.environment_workers:EnvironmentWorkers.serve  hands on what is done
actors.episodes.sampling:Sampling._begun  takes the rollout
actors.episodes.sampling:Sampling._submit  gives it to the engine

# The engine samples a turn
actors.episodes.rollout:Rollout.request  the prompt and all tokens so far
actors.engine.threaded:ThreadedEngine.submit  puts a command into the engine's queue
actors.engine.engine_thread:EngineThread._serve  executes commands, then makes a step
actors.engine.engine_thread:EngineThread.admit  begins the request, or refuses it
actors.engine.engine:Stepper  what an engine has to offer
actors.engine.torch_engine:TorchStepper.step  the small engine: a token for every row
actors.engine.torch_engine:TorchStepper._prefill  takes new prompts of one length together
actors.engine.torch_engine:RowCache  keys and values of the rows
actors.engine.torch_engine:MaskForm  what each token sees
actors.engine.torch_engine:TorchStepper._sample  draws the tokens, and keeps their log-probs
actors.engine.torch_engine:own_draws  by numbers of its own
actors.engine.torch_engine:CachedRequest.append_token  ends what is long enough
actors.engine.vllm_engine:VllmStepper.admit  the same with vLLM
actors.engine.vllm_engine:CoreRequests.add  hands the request to vLLM's core
actors.engine.vllm_private:new_request  in the core's own form
actors.engine.vllm_engine:CoreRequests.step  makes tokens of the core's outputs
actors.engine.vllm_private:sampled_logprobs  finds the log-probs in them
actors.engine.engine_thread:EngineThread._record  gives them the version of the weights
actors.engine.engine_thread:RequestTable.record  collects the tokens of each request
actors.engine.engine_thread:DeltaInbox.put_deltas  hands them over to the event loop
actors.engine.threaded:ThreadedEngine.deltas  waits for them
actors.episodes.sampling:Sampling._append  finds the episode
actors.episodes.rollout:Rollout.append_delta  appends them, and ends the turn
actors.episodes.rollout:Transcript.append_sampled  with log-probs, mask and versions

# It is judged
actors.episodes.scoring:Scoring.put_episode  has the environment judge the turn
actors.episodes.rollout:Rollout.judge  passes it on as text
actors.environments.reasoning_gym:ReasoningGymConversation.score  scores the answer
actors.environments.final_answer:candidates  finds it in the text
actors.episodes.rollout:Rollout.settle  goes on with another turn, or finishes
actors.episodes.scoring:Scoring.score_episodes  takes what is finished
actors.episodes.maker:EpisodeMaker.sample  makes the arguments of a reward function
actors.rewards.pool:RewardPool.score  takes a free slot
actors.rewards.process:RewardProcess._call  asks the process of the function
actors.rewards.channel:Channel.send  over a socket
actors.rewards.frames:pack_frame  as one message
configs.child:as_frame  with its length before it
actors.rewards.worker:RewardCaller.judge  calls the function in that process
actors.rewards.functions:call_batch  by the form that it has
actors.episodes.scoring:Scoring._submit  makes the record
actors.episodes.maker:EpisodeMaker.episode  all that is known of the episode
buffer.record.codec:encode_episode  as bytes
buffer.record.wire:write  in msgpack
buffer.record.summaries:checked_record  reads them back
buffer.record.rules:check_episode  against every rule

# It goes into the store
actors.episodes.outbox:Outbox.deliver  sends a batch, and keeps it until it is acknowledged
broker.client:BrokerClient.submit  the call
broker.server.service:Service._write  carries it out
broker.server.validation:check_submissions  checks fences and versions
buffer.record.summaries:summaries_of_records  reads many records at once
buffer.record.rules:EpisodeLimits.check_episode  refuses what no policy of the run can have made
broker.server.store_cache:StoreCache.refuse_unpublished  puts off versions that nobody published
broker.server.service:Batch.run  joins the rows of several requests
buffer.operations.leases:submit  the operation
buffer/lua/leases/submit.lua  stores the record; the last of a group completes it
actors.episodes.sampling:Sampling.deliver  ends the lease

# The learner claims it
learner.loop:Loop._train_next  one batch
learner.coordinator:Coordinator  what rank 0 and the other ranks do about it
learner.rank_zero:RankZero.next_batch  waits, plans, and broadcasts the plan
learner.data.claims:Claims.poll  claims, judges and drops, until a batch is full
buffer.operations.batches:claim  the operation
buffer/lua/batches/claim.lua  moves the oldest complete groups into the batch
learner.data.claims:Claims._judge  looks at what came
learner.data.records:Records.units  reads the records of groups
buffer.operations.batches:records  from Redis
buffer.record.codec:decode_episode  makes the episode again
learner.data.records:shape_reward  weighs the parts of its reward
learner.data.group_filter:GroupFilter.reason_to_drop  drops what is stale or impossible
learner.data.policy_lag:policy_lags  by the lag of its oldest token
learner.data.ledger:Ledger.hold  notes what the batch has
buffer.operations.batches:seal  so that every replay of it is the same
buffer/lua/batches/seal.lua  freezes it
learner.data.batch:plan_batch  assigns rank, microbatch and advantage
learner.algorithm.advantages:estimate  computes advantages from the rewards of a group
learner.algorithm.advantages:grpo  as the default settings do
learner.algorithm.advantages:whiten_group  over their deviation
learner.data.dealing:deal_episodes  balances ranks and microbatches
learner.model.sequence_cost:SequenceCost  by what a sequence costs
learner.data.batch:pack  puts its tokens behind those of others
learner.algorithm.aggregations:token  weighs each token in the loss
learner.algorithm.microbatch:Sequences.from_token_ids  the packed sequences

# Its gradient
learner.training.step:train_batch  prepares the batch, and makes its optimizer steps
learner.training.preparation:prepare  passes without a gradient, where the settings need any
learner.training.step:accumulate  one forward and backward pass
learner.model.policy:Policy.forward  scores the tokens
learner.model.sequence_parallel:SequenceSplit  this rank's part of them
learner.model.attention:run_trunk  runs the model up to its last states
learner.model.attention:attend  each sequence attends to itself and its prompt
learner.model.tensor_parallel:local_parameters  the output layer as plain tensors
learner.model.output_layer:score_tokens  chooses a way by whether the loss is a sum over tokens
learner.model.output_layer:ScoresWithLoss.forward  computes loss and gradient while logits are there
learner.model.logits:chunks  the logits of some tokens at a time
learner.model.logits:Softmax.prepare  at the temperature of sampling
learner.model.logits:LogitChunk.statistics  log-probs and entropies
learner.model.logits:VocabularyPart.merge  over the ranks that divide the vocabulary
learner.algorithm.losses:policy_loss  advantage x correction x surrogate
learner.algorithm.losses:behaviour  the policy that ratios are measured from
learner.algorithm.microbatch:Segments  sums over the tokens of an episode
learner.algorithm.corrections:tis  the correction of the default settings
learner.algorithm.surrogates:clip  and their surrogate
learner.model.logits:LogitChunk.differentiate  puts the gradient in the place of the logits
learner.model.logits:Gradients.add  adds it up for states and weights
learner.model.output_layer:ScoresWithLoss.backward  gives it to autograd, which does the rest
"""

WEIGHT_VERSION = """
# The learner makes and publishes it
learner.training.optimizer:ScheduledOptimizer.step  changes the parameters
learner.loop:Loop._publish  begins to publish them, beside training
learner.weights.background_publish:BackgroundPublisher.start  in a thread
learner.weights.publish:WeightPublisher.publish  gathers, seals and announces
learner.weights.memory:WeightSlots.acquire  takes a slot of shared memory
learner.weights.gather:gather  writes the tensors there, whole
learner.weights.layout:published  in their order
learner.weights.probe:PolicyProbe.__call__  scores some tokens, to compare engines with
learner.model.policy:probe_scores  by a forward pass
broker.protocol.manifest:digest_of  the digest that every receiver checks
learner.weights.publish:WeightPublisher._announce  from here on, others see it
learner.weights.memory:WeightSlots.seal  offers the slot
broker.weights.seal:Seal  a number that tells whether a slot is being written
learner.weights.sidecar:Sidecar.wake  a byte on the pipe of the publisher's process

# Its pointer goes through the store
learner.assembly:make_publisher  gives the publisher the function that puts the pointer
learner.data.ledger:Ledger.publish  keeps it for a store that forgets
learner.checkpointing.recovery:publish_pointer  makes it an operation
buffer.operations.batches:publish  the operation
buffer/lua/run/publish.lua  stores it, never backwards
broker.server.server:Broker._serve  has the broker look some times a second
broker.server.store_cache:StoreCache.refresh_publication  reads it
buffer.operations.run:publication  by an operation
buffer/lua/run/read.lua  and a script
broker.server.leasing:Leasing._reply  every reply to an actor carries it
actors.loop:ActorLoop._follow_publication  takes it from the reply
actors.weights.receiver:WeightReceiver.offer  follows the publisher to its endpoint
actors.weights.links:PublisherLink.run  stays connected to it

# The publisher's process announces it
learner.weights.publisher_process:_read_stdin  reads the byte
learner.weights.server:WeightServer._deliver_all  looks for a sealed version
learner.weights.pull:VersionsOnOffer.advance  makes it the current one
learner.weights.server:WeightServer._announce  tells the actors
learner.weights.updates:SparseChain.advance  what has changed since the last one
broker.weights.sparse:encode_changes  as places and values
broker.weights.rice_coding:encode_numbers  the places in few bits
learner.weights.server:WeightServer._on_join  an actor says every two seconds what it holds
learner.weights.broadcast:Broadcast.freeze_members  freezes the members of a group
learner.weights.epochs:WeightEpochs.begin_epoch  by who is there and can be in one
learner.weights.nccl_strikes:NcclStrikes.clean  and has broken none
learner.weights.broadcast:Broadcast._form_group  invites them
learner.weights.broadcast:Broadcast._send  sends when all are ready
learner.weights.updates:form_for  all bytes, or only changes
broker.weights.group_thread:GroupThread.call  in the thread of the group
learner.weights.group:SendingGroup.send  bucket by bucket
learner.weights.server:WeightServer._offer  tells those who pull
broker.weights.port:WeightPort.post  writes each message

# The actor fetches it
actors.weights.links:WeightLink.read  reads the message
actors.weights.receiver:WeightReceiver._on_message  passes it on
actors.weights.transfer:WeightTransfer._on_announce  begins a transfer
actors.weights.transfer:WeightTransfer._fetch  by the first transport that brings it
actors.weights.staging_files:StagingFiles.acquire  into a file of this machine's memory
actors.weights.group:GroupMember._follow  as a member of a group
actors.weights.place:MemberPlace  joined where the engine's weights are
actors.engine.weights.member_thread:MemberThread.receive  in this process
actors.engine.weights.group:ReceivingGroup.receive  bucket by bucket
actors.weights.worker_line:WorkerLine.receive  or in vLLM's worker
actors.engine.weights.worker_member:WorkerMember._receive  at the other end of that line
actors.weights.memory:PublisherMemory.borrow  or where it lies, on the learner's machine
actors.weights.pull:WeightPull.fetch  or from those who have it
actors.weights.sources:WeightSources.choose_sources  in the order of the settings
actors.weights.slices:SlicePull.run  slice by slice
actors.weights.slices:Pace  leaves a source that is slow
learner.weights.pull:VersionsOnOffer.read  where the publisher finds a slice
actors.weights.updates:WeightUpdates.add_changes  changes are added to what is held
broker.weights.sparse:apply_changes  one after the other
actors.weights.transfer:WeightTransfer._hand_over  the whole version, checked
actors.weights.held:HeldWeights.hold  others may have it from here

# The engine samples with it
actors.episodes.held_leases:SwapGate.wait  waits for the end of an evaluation
actors.weights.receiver:WeightReceiver._apply  swaps, and checks what the engine computes
actors.engine.engine:StagedWeights  the file and its manifest
actors.engine.threaded:ThreadedEngine.apply  prepares beside the steps, then asks for the swap
actors.engine.torch_engine:TorchStepper.prepare  the small engine fills a shadow
actors.engine.wire_tensors:named_tensors  from views of the file
actors.engine.torch_engine:TorchStepper.load  and exchanges the two
actors.engine.vllm_engine:VllmStepper.prepare  vLLM on a CPU as well
actors.engine.weights.shadow_model:ShadowModel.fill  through its loader, or by a plan
actors.engine.weights.fill_plan:make_plan  of where each tensor belongs
actors.engine.vllm_engine:VllmStepper.load  on a card in place
actors.engine.weights.live_model:LiveModel.load  in each worker
actors.engine.weights.pinned_files:PinnedFiles.view  from a file that the card reads by itself
actors.engine.engine_thread:EngineThread.apply  between two steps; the version is this one now
actors.weights.receiver:WeightReceiver._probe  compares log-probs with the learner's
actors.weights.probe:ProbeJudge.bound  within what rounding explains
actors.weights.read_back:StorageCheck.fault  and now and then all that is stored
actors.weights.receiver:WeightReceiver._serve  lets work in again
actors.loop:ActorLoop._lease  asks for work with the new version
actors.engine.engine_thread:EngineThread._record  gives the next token its number
actors.engine.engine_thread:RequestTable.record  in a span of that version
"""

MAX_POLICY_LAG = """
# It is read and checked
configs.loader:load  reads the YAML file
configs.tables.run:RunSettings  the field, its range and its default
configs.settings:Settings._tables_agree  checks it beside the other tables
configs.validation.tables:disagreements  by one check after the other
configs.validation.tables:_check_publish_every  at least one version must come within the lag
configs.validation.algorithm:_check_correction_is_set  without a lag no ratio is needed
configs.validation.learner:deterministic_disagreements  a repeatable run has none
configs.validation.store:max_units_in_flight  how many groups it admits between lease and training
configs.validation.store:memory_shortage  whose episodes Redis has to hold
console.run.checks.store:check_memory  before the start

# The store admits work by it
learner.checkpointing.resume:take_over  registers the run, and warns of a small Redis
configs.hashes:settings_hash  who has another value is refused
learner.checkpointing.recovery:register_run  hands it to the store
buffer.operations.run:begin_run  as a field of the run
buffer/lua/run/begin_run.lua  which stays what it was at the beginning
buffer/lua/leases/lease.lua  nothing for old weights, and no more groups than it admits
learner.data.curriculum:Feeder.__init__  twice as many are created ahead

# The learner drops by it
learner.data.group_filter:GroupFilter._is_stale  a group whose oldest token is older
learner.data.policy_lag:policy_lags  by so many batches
learner.data.claims:Claims.poll  is dropped, and its prompt asked again

# What people see of it
configs.fleet:next_wanted  how fast a batch may follow another where versions travel slowly
configs.fleet:_bounded  no more actors than may have an episode
broker.metrics_page:BrokerPage.__init__  groups admitted, for Prometheus
buffer.sampling:groups_in_flight  and for `nyala status` and `nyala top`
learner.reporting.advice.flow_rules:groups_dropped  advises to raise it
learner.reporting.advice.training_rules:lag_high  or to lower it
console.report.record:actor_lives  an actor of which nothing was trained for longer has gone
console.report.model_card:model_card  names it
"""

REWARD_MEAN = """
learner.reporting.metrics:batch_figures  the mean over the episodes of a batch
learner.reporting.batch_log:BatchLog.record  into the line of metrics.jsonl
learner.rank_zero:RankZero.record  which the page gets, too
learner.reporting.metrics_page:LearnerPage.trained  and keeps until the next batch
learner.reporting.figures:FIGURES  by its key: name and unit in Prometheus
learner.reporting.metrics_page:LearnerPage.values  read when somebody asks
learner.reporting.metrics_page:LearnerPage.serving  while the learner runs
configs.metrics_serving:serving  where the settings name an address
configs.metrics_server:MetricsServer._answer  answers a GET of /metrics
configs.metrics_server:_FiguresCollector.collect  with all that the page has
configs.metrics_server:_family  in Prometheus' form
"""

JOURNEYS = {
    "episode": EPISODE,
    "weight_version": WEIGHT_VERSION,
    "max_policy_lag": MAX_POLICY_LAG,
    "reward_mean": REWARD_MEAN,
}


class Step(NamedTuple):
    """One line of a journey."""

    place: str
    """`module:qualified.name`, or the path of a script."""
    words: str
    heading: str = ""
    """Of the steps from here on; empty = as before."""


class Place(NamedTuple):
    """Where a step is in a tree."""

    path: str
    line: int


Find = Callable[[str], Place | None]
"""Finds the place that a step names."""


def steps_of(journey: str) -> Iterator[Step]:
    """Yield the steps of a journey in their order."""
    heading = ""
    for line in JOURNEYS[journey].strip().splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            place, _, words = line.partition("  ")
            yield Step(place, words, heading)
            heading = ""


class Tree:
    """The sources of a commit, or of this checkout.

    Args:
        files: Path -> text.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files

    @classmethod
    def of_checkout(cls, root: Path = REPOSITORY) -> Tree:
        """Read the files of the rooms as they are on the disk."""
        paths = [path for room in ROOMS for path in (root / room).rglob("*.*")]
        kept = [path for path in paths if path.suffix in {".py", ".lua"}]
        return cls({str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in kept})

    @classmethod
    def of_commit(cls, commit: str) -> Tree:
        """Read the files of the rooms at a commit.

        Raises:
            LookupError: There is no such commit here.
        """
        command = ("git", "-C", str(REPOSITORY), "archive", "--format=tar", commit, *ROOMS)
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise LookupError(f"commit {commit} must be in this clone: {done.stderr.decode()}")
        files = {}
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                if member.name.endswith((".py", ".lua")) and (file := archive.extractfile(member)):
                    files[member.name] = file.read().decode()
        return cls(files)

    def find(self, place: str) -> Place | None:
        """Return where a step is, at exactly the place that it names; None if it is not there."""
        module, _, name = place.partition(":")
        if not name:
            return Place(place, 1) if place in self.files else None
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in self.files and (line := definitions(self.files[path]).get(name)):
                return Place(path, line)
        return None

    def find_before(self, place: str) -> Place | None:
        """Return where a step was: in a part of its chapter, or wherever else its name is alone."""
        module, colon, name = WAS.get(place, place).partition(":")
        name = NAMED.get(name, name)
        for old in PARTS.get(module, ()):
            renamed = [was for (of, was), now in RENAMED.items() if (of, now) == (old, name)]
            if found := self.find(f"{old}:{renamed[0] if renamed else name}"):
                return found
        anywhere = self._places[name or Path(place).name]
        return self.find(module + colon + name) or (anywhere[0] if len(anywhere) == 1 else None)

    @cached_property
    def _places(self) -> Mapping[str, list[Place]]:
        """All definitions by their qualified names, and scripts by those of their files."""
        places: defaultdict[str, list[Place]] = defaultdict(list)
        for path, text in self.files.items():
            if path.endswith(".lua"):
                places[Path(path).name].append(Place(path, 1))
                continue
            for name, line in definitions(text).items():
                places[name].append(Place(path, line))
        return places


@cache
def definitions(text: str) -> Mapping[str, int]:
    """Find functions, methods, classes and constants of a module: qualified name -> line."""
    lines: dict[str, int] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines[prefix + node.name] = node.lineno
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                lines.update({t.id: node.lineno for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(text).body, "")
    return lines


def missing_steps(tree: Tree) -> list[str]:
    """Name the steps of all journeys that are not in a tree."""
    return [
        f"{journey}: {step.place}"
        for journey in JOURNEYS
        for step in steps_of(journey)
        if tree.find(step.place) is None
    ]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of one journey in one tree."""

    steps: int
    files: int
    lua_files: int
    """Of the files."""
    folders: int
    lines: int
    """Of all these files together."""
    missing: list[str]
    """Steps that are not there."""


def counts_of(journey: str, find: Find, tree: Tree) -> Counts:
    """Count what a journey enters."""
    found = {step.place: find(step.place) for step in steps_of(journey)}
    paths = {place.path for place in found.values() if place is not None}
    return Counts(
        steps=len(found),
        files=len(paths),
        lua_files=sum(path.endswith(".lua") for path in paths),
        folders=len({str(Path(path).parent) for path in paths}),
        lines=sum(len(tree.files[path].splitlines()) for path in paths),
        missing=[name for name, place in found.items() if place is None],
    )


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of all rooms but the laboratory, in one tree."""

    files: int
    """Of Python."""
    folders: int
    small_modules: int
    """Under 60 lines."""
    median_lines: float
    """Of the modules: a folder's `__init__` is not one of them."""
    lines: int
    """With the scripts in Lua."""


def size_of(tree: Tree) -> Size:
    """Count what a newcomer has before them."""
    lines = {
        path: len(text.splitlines())
        for path, text in tree.files.items()
        if not path.startswith(LABORATORY)
    }
    python = [path for path in lines if path.endswith(".py")]
    modules = [lines[path] for path in python if not path.endswith("__init__.py")]
    return Size(
        files=len(python),
        folders=len({str(Path(path).parent) for path in python}),
        small_modules=sum(count < SMALL for count in modules),
        median_lines=median(modules),
        lines=sum(lines.values()),
    )


def tour(journey: str, find: Find) -> Iterator[str]:
    """Yield the lines of a guided tour."""
    for number, step in enumerate(steps_of(journey), start=1):
        if step.heading:
            yield f"\n{step.heading}"
        place = find(step.place)
        where = "not there" if place is None else f"{place.path}:{place.line}"
        name = step.place.partition(":")[2] or Path(step.place).name
        yield f"{number:4} {where}  {name}\n       {step.words}"


def main() -> None:
    """Count, or walk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walk", choices=JOURNEYS, help="print this journey as a tour")
    parser.add_argument("--at", metavar="COMMIT", help="in place of this checkout")
    chosen = parser.parse_args()
    try:
        tree = Tree.of_checkout() if chosen.at is None else Tree.of_commit(chosen.at)
    except LookupError as error:
        sys.exit(str(error))
    find = tree.find if chosen.at is None else tree.find_before
    if chosen.at is None and (missing := missing_steps(tree)):
        sys.exit("\n  ".join(["each step must be in this checkout, got none of:", *missing]))
    if chosen.walk:
        print(*tour(chosen.walk, find), sep="\n")
        return
    arms: dict[str, dict[str, Counts]] = {}
    trees = {"now": tree}
    try:
        before = Tree.of_commit(BEFORE)
    except LookupError as error:
        print(f"only the arm of now: {error}", file=sys.stderr)
    else:
        trees["before"] = before
        arms["before"] = {name: counts_of(name, before.find_before, before) for name in JOURNEYS}
    arms["now"] = {name: counts_of(name, find, tree) for name in JOURNEYS}
    ratios = {
        f"{name}_files": round(then.files / arms["now"][name].files, 3)
        for name, then in arms.get("before", {}).items()
    }
    shown = {arm: {name: asdict(each) for name, each in of.items()} for arm, of in arms.items()}
    for arm, sources in trees.items():
        shown[arm]["tree"] = asdict(size_of(sources))
    print(json.dumps({"arms": shown, "ratios": ratios, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
