"""Modules that have moved, names that have changed, and a program that rewrites imports of them.

    python -m tests.packaging.moved_modules FOLDER            rewrites all files below the folder
    python -m tests.packaging.moved_modules --check FOLDER    lists imports that find nothing

`CHAPTERS` has every module that was made of others or got another place: its name, then its parts
in their order. `NAMES_OF_MODULES` has each class, function and constant of a module that has
another name now. Rewritten are imports and the uses of what they import, dotted names in strings
(`python -m`, entry points, patches) and paths of files, in Python and in text files alike.
Rewriting a file twice changes nothing more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "agents", "learner", "console", "lab")
TEXTS = {".cfg", ".ini", ".ipynb", ".md", ".sh", ".toml", ".txt", ".yaml", ".yml"}

CHAPTERS = """
configs.error_text
 configs.aliases configs.error_text
configs.errors
 configs.errors configs.printable
configs.fleet
 configs.fleet.cost configs.fleet.wanted configs.fleet.meter
configs.json_lines
 console.display.json_lines
configs.machine
 configs.importing configs.machine.arithmetic configs.machine.gpus
configs.metrics
 configs.metrics.figures configs.metrics.endpoint configs.metrics.health configs.metrics.cards
configs.metrics_server
 configs.metrics.server
configs.metrics_serving
 configs.metrics.serving
configs.traces
 configs.tracing.span configs.tracing.traces configs.tracing.episodes
configs.tracing
 configs.tracing.exporter configs.tracing.tracing
configs.otlp
 configs.tracing.otlp
configs.tables.algorithm
 configs.tables.algorithm configs.tables.critic configs.tables.rewards
configs.tables.learner
 configs.tables.learner configs.tables.parallel configs.tables.guards
configs.tables.run
 configs.tables.run configs.tables.console
configs.user_code
 configs.own_code
configs.user_python
 actors.environments.hosted.python
configs.validation.algorithm
 configs.validation.algorithm configs.validation.critic configs.validation.reference
configs.validation.learner
 configs.validation.learner configs.validation.deterministic configs.validation.parallel
configs.validation.tables
 configs.validation.tables configs.validation.fleet configs.validation.servers
buffer.client.server_identity
 buffer.client.known_holes buffer.client.server_identity
buffer.operations.batches
 buffer.operations.batches buffer.operations.replay
buffer.operations.operation
 buffer.operations.operation buffer.operations.replies
buffer.operations.run
 buffer.operations.run buffer.operations.recovery
buffer.operations.tasks
 buffer.operations.tasks buffer.operations.dead_letters buffer.operations.audit
buffer.record.rules
 buffer.record.limits buffer.record.rules
buffer.record.summaries
 buffer.record.checked buffer.record.summaries
buffer.record.wire
 buffer.record.schema buffer.record.faults buffer.record.wire
buffer.sampling
broker.client
 broker.client.abandoned_leases broker.client.client
broker.connection
 broker.client.connection
broker.protocol.codec
 broker.protocol.earlier broker.protocol.codec
broker.server.dispatch
 broker.server.components broker.server.dispatch
broker.server.service
 broker.server.batching broker.server.service
broker.server.validation
 broker.server.permissions broker.server.validation
broker.transport.enrolled
 broker.transport.enrolled broker.transport.key_rotation
broker.transport.sockets
 broker.transport.addresses broker.transport.sockets broker.transport.router
actors.__main__
 actors.export actors.__main__
actors.capacity
 actors.capacity.cache_meter actors.capacity.batch_size actors.capacity.room
 actors.capacity.tuning actors.capacity.work
actors.chat
 actors.chat actors.columns
actors.loop
 actors.unless actors.loop
actors.engine.turns
 actors.engine.turns.turn_frame actors.engine.turns.stop_strings
actors.engine.waits
 actors.engine.waits.answers actors.engine.waits.stall
actors.engine.torch_engine
 actors.engine.rows.draws actors.engine.rows.kv_cache actors.engine.rows.mask_form
 actors.engine.rows.row actors.engine.torch_engine
actors.environments.base
 actors.environments.base actors.environments.held_out
actors.environments.calculator
 actors.environments.arithmetic actors.environments.calculator
actors.environments.final_answer
 actors.environments.final_answer actors.environments.partial_credit
actors.environments.reasoning_gym
 actors.environments.reasoning_gym_modules actors.environments.compact
 actors.environments.reasoning_gym
actors.environments.adapters.games
 actors.environments.adapters.shared_generators actors.environments.adapters.games
 actors.environments.adapters.game_environment
actors.environments.answer_process
 actors.environments.dataset.mathematics
actors.environments.answer_worker
 actors.environments.dataset.math_worker
actors.environments.dataset.environment
 actors.environments.dataset.settings actors.environments.dataset.environment
actors.environments.hosted.environment
 actors.environments.hosted.host actors.environments.hosted.environment
actors.engine.choice
 actors.engine.choice actors.engine.device actors.libraries
actors.environments.hosted.serving
 actors.environments.hosted.frames actors.environments.hosted.lanes
 actors.environments.hosted.serving
actors.episodes.environment_workers
 actors.episodes.environment_job actors.episodes.environment_loop
 actors.episodes.environment_threads actors.episodes.environment_workers
actors.episodes.held_leases
 actors.episodes.swap_gate actors.episodes.held_leases
actors.episodes.rollout
 actors.episodes.transcript actors.episodes.rollout
actors.sandbox.kernel
 actors.sandbox.kernel actors.sandbox.call_filter actors.sandbox.file_view
actors.environments.registry
 actors.environments.deadline actors.environments.registry
actors.engine.vllm_engine
 actors.engine.waits.core_end actors.engine.vllm_core actors.engine.vllm_engine
actors.engine.engine_thread
 actors.engine.token_versions actors.engine.engine_thread
learner.coordinator
 learner.coordinator learner.components
learner.initial_model
 learner.initial_model.character_model learner.initial_model.warm_start
learner.launch
 learner.launch.rank_processes learner.launch.nodes learner.launch.usable_ranks
 learner.launch.one_machine
learner.several_machines
 learner.launch.lines learner.launch.node_zero learner.launch.other_node
 learner.launch.several_machines
learner.phase_names
 learner.profiling.phase_names
learner.profiling
 learner.profiling.phases learner.profiling.trace learner.profiling.utilization
learner.algorithm.advantages
 learner.algorithm.group_statistics learner.algorithm.advantages
learner.algorithm.losses
 learner.algorithm.proximal learner.algorithm.losses
learner.algorithm.microbatch
 learner.algorithm.sequences learner.algorithm.microbatch
learner.algorithm.token_advantages
 learner.algorithm.returns learner.algorithm.token_advantages
learner.checkpointing.checkpoint
 learner.checkpointing.fit learner.checkpointing.background_save learner.checkpointing.checkpoint
learner.checkpointing.export
 learner.checkpointing.tensors.merged learner.checkpointing.export
learner.checkpointing.folders
 learner.checkpointing.folders learner.checkpointing.lineages
learner.checkpointing.resume
 learner.checkpointing.resume learner.checkpointing.rollback learner.checkpointing.trust
learner.checkpointing.tensors
 learner.checkpointing.tensors.shards learner.checkpointing.tensors.named
 learner.checkpointing.tensors.random_state learner.checkpointing.tensors.earlier_format
learner.data.alarms
 learner.data.sampling_alarm learner.data.commit_pressure
learner.data.evaluation
 learner.data.answers learner.data.evaluation
learner.data.group_filter
 learner.data.drop_counts learner.data.group_filter
learner.model.activations
 learner.model.activation_offload learner.model.activation_checkpointing
learner.model.cpu
 learner.model.cpu.memory learner.model.cpu.products
learner.model.logits
 learner.model.logits.softmax learner.model.logits.vocabulary learner.model.logits.chunks
learner.model.lora
 learner.model.lora.adapted_linear learner.model.lora.adapters
learner.model.output_layer
 learner.model.logits.one_pass learner.model.logits.two_passes learner.model.output_layer
learner.model.policy
 learner.model.compilation learner.model.gradient_reduction learner.model.policy
learner.model.tensor_parallel
 learner.model.parallel.tensor_group learner.model.parallel.tensor_parallel
learner.reporting.batch_log
 learner.reporting.batch_digest learner.reporting.batch_log
learner.reporting.run_snapshot
 learner.reporting.curve learner.reporting.bulletin
learner.reporting.journal
 learner.reporting.summary learner.reporting.journal
learner.reporting.samples
 learner.reporting.sample_lines learner.reporting.sample_files
learner.reporting.sample_writer
 learner.reporting.run_tokenizer learner.reporting.sample_writer
learner.reporting.advice.advisor
 learner.reporting.advice.catalogue learner.reporting.advice.advisor
learner.reporting.advice.advisor_thread
 learner.reporting.fleet_watch learner.reporting.advice.advisor_thread
learner.reporting.advice.answer_rules
 learner.reporting.advice.answer_rules learner.reporting.advice.stop_rules
learner.reporting.advice.evidence
 learner.reporting.advice.evidence learner.reporting.advice.window learner.reporting.advice.rule
learner.reporting.trackers.delivery
 learner.reporting.trackers.bookmark learner.reporting.trackers.delivery
learner.reporting.trackers.delivery_process
 learner.reporting.trackers.choice learner.reporting.trackers.delivery_process
learner.reporting.trackers.feed
 learner.reporting.trackers.tail learner.reporting.trackers.feed
learner.reporting.trackers.names
 learner.reporting.trackers.names learner.reporting.trackers.parameters
learner.reporting.trackers.http_api
 learner.reporting.trackers.kinds.http_api learner.reporting.trackers.kinds.requirements
learner.reporting.trackers.mlflow_run
 learner.reporting.trackers.kinds.mlflow_run
learner.reporting.trackers.tensorboard_events
 learner.reporting.trackers.kinds.tensorboard_events
learner.reporting.trackers.trackio_run
 learner.reporting.trackers.kinds.trackio_run
learner.reporting.trackers.wandb_run
 learner.reporting.trackers.kinds.wandb_run
learner.training.divergence
 learner.training.histogram learner.training.divergence learner.training.divergence_meter
learner.training.preparation
 learner.training.preparation learner.training.m2po_bound
learner.loop
 learner.training.memory_budget learner.loop
learner.model.saved_model
 learner.model.tensor_files learner.model.saved_model
console.api
 console.api.up_process console.api.run console.api.creation
console.command_line
 console.verb_table console.typed console.bare_settings console.arguments
console.display.display
 console.display.view.screen console.display.display
console.display.live_view
 console.display.view.lines console.display.view.actor_rows console.display.view.live_view
console.display.progress
 console.display.advice console.display.stages console.display.progress
 console.display.newest_sample
console.display.result
 console.display.reward_plot console.display.result
console.display.snapshot
 console.display.snapshot console.display.figures
console.doctor.command
 console.doctor.examination console.doctor.command
console.doctor.implied
 console.doctor.implied console.doctor.packed
console.doctor.live_run
 console.doctor.clocks console.doctor.live_run
console.live.logs
 console.live.log_lines console.live.logs
console.live.top
 console.display.from_store console.live.local_run console.live.remote_run console.live.top
console.report.curve_charts
 console.report.charts.curve_charts
console.report.curves
 console.report.record.figures console.report.record.curves console.report.record.derived
 console.report.record.evaluations
console.report.drawing
 console.report.charts.drawing console.report.charts.thinning
console.report.model_card
 console.report.base_model console.report.model_card
console.report.record
 console.report.record.actor_lives console.report.record.answers
 console.report.record.changed_settings console.report.record.runs
console.report.run_charts
 console.report.charts.actor_chart console.report.charts.run_charts
console.report.sections
 console.report.headline console.report.comparisons console.report.sections
console.report.write
 console.report.write console.report.command
console.run.card_memory
 console.run.model_shape console.run.card_memory
console.run.fork_process
 console.run.forks.server
console.run.fork_server
 console.run.forks.fork_server
console.run.plan
 console.run.placement console.run.plan
console.run.process
 console.run.process_log console.run.process
console.run.supervisor
 console.run.restart_policy console.run.supervisor
console.run.user_files
 console.run.own_files
console.run.checks.machine
 console.run.checks.addresses console.run.checks.devices console.run.checks.key_files
 console.run.checks.trackers
console.run.checks.model
 console.run.checks.model console.run.checks.room
console.samples.command
 console.samples.view console.samples.command
console.sweep.grid
 console.sweep.grid console.sweep.outcome
console.sweep.sweep
 console.sweep.schedule console.sweep.sweep console.sweep.command
console.verbs.buffer
 console.verbs.buffer_queries console.verbs.buffer
console.verbs.checkpoints
 console.checkpoints.command
console.run.run_folder
 console.run.run_folder console.report.record.versions
console.verbs.new
 console.verbs.new console.verbs.init_model
console.verbs.push
 console.checkpoints.hub console.checkpoints.push
console.verbs.compare
 console.compare.bootstrap console.compare.grades console.compare.reached
 console.compare.comparison console.compare.command
console.verbs.fleet
 console.fleet.render console.fleet.follow console.fleet.command
console.verbs.join_pack
 console.join_pack.pack console.join_pack.command
console.verbs.messages
 console.reference.message_shapes console.reference.messages_list
console.verbs.roles
 console.actor_group.plan console.actor_group.group console.verbs.roles
console.samples.try_command
 console.samples.model_of_run console.samples.try_command
console.verbs.settings_list
 console.reference.markdown console.reference.settings_list
console.verbs.reference_lists
 console.verbs.loss_catalogue console.display.metrics_list
console.run.preflight
 console.run.preflight console.run.forks.checks
console.verbs.data
 actors.environments.dataset.examination console.verbs.data
console.doctor.machine
 console.doctor.packages console.doctor.machine
lab.actor_fleet
 console.chaos.proc_stat console.chaos.actor_fleet
lab.command
 console.chaos.command
lab.fault_case
 console.chaos.fault console.chaos.fault_case
lab.kill_run
 console.chaos.arms console.chaos.kill_run
lab.live_run
 console.chaos.live_run
lab.matrix
 console.chaos.invariants console.chaos.matrix
lab.pair_case
 console.chaos.pair_case console.chaos.pairs
lab.task_trace
 console.chaos.task_trace
lab.endurance.endurance
 console.chaos.endurance.endurance
lab.endurance.growth
 console.chaos.endurance.growth
lab.endurance.lies
 console.chaos.endurance.lies
lab.endurance.lying_actor
 console.chaos.endurance.lying_actor
lab.faults.clock_jumps
 console.chaos.faults.clock_jumps
lab.faults.network
 console.chaos.faults.network_namespace console.chaos.faults.network
 console.chaos.faults.partition
lab.faults.processes
 console.chaos.faults.processes
lab.faults.proxy
 console.chaos.faults.proxy
lab.faults.stores
 console.chaos.faults.disk console.chaos.faults.stores console.chaos.faults.failover
actors.engine.weights.fill_plan
 actors.engine.shadow.plan
actors.engine.weights.group
 actors.membership.group
actors.engine.weights.live_model
 actors.engine.shadow.live
actors.engine.weights.loading
 actors.engine.vllm_weights
actors.engine.weights.member_thread
 actors.membership.member_thread
actors.engine.weights.pinned_files
 actors.engine.dma.pinned_files
actors.engine.weights.shadow_model
 actors.engine.shadow.model
actors.engine.weights.stored
 actors.engine.shadow.stored
actors.engine.weights.worker_member
 actors.membership.worker_member
actors.engine.weights.worker_orders
 actors.membership.worker_orders
actors.weights.group
 actors.weights.group_member
actors.weights.memory
 actors.weights.publisher_memory
actors.weights.place
 actors.membership.place
actors.weights.probe
 actors.weights.checks.probe
actors.weights.read_back
 actors.weights.checks.read_back
actors.weights.saved
 actors.weights.saved.file actors.weights.saved.download
actors.weights.slices
 actors.weights.slices actors.weights.pace
actors.weights.worker_line
 actors.membership.worker_line
learner.weights.gather
 learner.weights.wire.gather
learner.weights.layout
 learner.weights.wire.layout
learner.weights.memory
 learner.weights.slots
learner.weights.probe
 learner.weights.wire.probe
learner.weights.pull
 learner.weights.versions_on_offer learner.weights.paths.slice_digests
learner.weights.server
 learner.weights.server learner.weights.pauses
learner.weights.sites
 learner.weights.paths.sites learner.weights.paths.pull_tree
learner.weights.updates
 learner.weights.updates.sparse_chain learner.weights.updates.form
"""

FOLDERS = {
    "actors.engine.dma": "actors.engine.weights",
    "actors.engine.shadow": "actors.engine.weights",
    "actors.membership": "actors.engine.weights",
    "actors.weights.checks": "actors.weights",
    "learner.weights.paths": "learner.weights",
    "learner.weights.wire": "learner.weights",
    "console.chaos": "lab",
    "console.chaos.endurance": "lab.endurance",
    "console.chaos.faults": "lab.faults",
    "actors.engine.rows": "actors.engine.torch_engine",
    "console.checkpoints": "console.verbs.checkpoints",
    "console.compare": "console.verbs.compare",
    "console.join_pack": "console.verbs.join_pack",
    "console.actor_group": "console.verbs.roles",
    "console.display.view": "console.display.live_view",
    "console.report.charts": "console.report.drawing",
    "learner.model.parallel": "learner.model.tensor_parallel",
    "learner.reporting.trackers.kinds": "learner.reporting.trackers",
}
"""Folder before -> folder or module now, for texts that name one."""

RENAMED = {
    ("configs.validation.reference", "_whitens_groups"): "_check_whitening_with_kl_reward",
    ("console.api.up_process", "LOOK_EVERY_S"): "POLL_UP_EVERY_S",
    ("actors.environments.hosted.frames", "pack_frame"): "pack_message",
    ("actors.environments.hosted.frames", "read_frame"): "read_message",
    ("console.verbs.loss_catalogue", "as_markdown"): "losses_as_markdown",
    ("console.verbs.loss_catalogue", "named"): "losses_named",
    ("configs.metrics.cards", "USE"): "CARD_USE",
    ("configs.metrics.cards", "MEMORY"): "CARD_MEMORY",
    ("configs.metrics.cards", "METRICS"): "CARD_METRICS",
    ("learner.training.memory_budget", "FILE"): "MEMORY_FILE",
    ("console.display.metrics_list", "as_markdown"): "metrics_as_markdown",
    ("console.display.metrics_list", "as_lines"): "metrics_as_lines",
    ("console.doctor.packages", "GROUP"): "PACKAGES",
    ("console.chaos.faults.network", "SERVE_S"): "PROXY_SERVE_S",
    ("console.chaos.faults.partition", "SERVE_S"): "PARTITION_SERVE_S",
    ("console.report.record.versions", "NAME"): "VERSIONS_FILE",
}
"""Names that two parts of a chapter had, (module before, name) -> name now."""

NAMES_OF_MODULES = """
configs.fleet: Measured -> FleetMeasurements
configs.fleet: Wanted -> WantedActors
configs.json_lines: Follower -> LineFollower
configs.json_lines: JsonLines -> JsonLinesFollower
configs.user_code: load_own -> load_user_code
configs.user_code: own_place -> user_code_place
configs.tables.base: Table -> SettingsTable
configs.tables.environments: Place -> MixtureItem
configs.traces: Life -> LeaseTrace
configs.traces: Phase -> EpisodePhase
configs.traces: trace_life -> begin_lease_trace
buffer.operations.operation: Call -> ScriptCall
buffer.operations.run: show -> write_run_snapshot
buffer.operations.run: shown -> read_run_snapshot
buffer.operations.values: Closed -> LeasingPauses
buffer.operations.values: Memory -> RedisMemory
buffer.operations.values: Publication -> StoredPublication
buffer.record.filesystems: Translated -> OSErrorProxy
broker.protocol.fields: Message -> WireMessage
broker.protocol.fields: Part -> MessagePart
broker.protocol.messages: MAX_BULLETIN -> MAX_RUN_SNAPSHOT
broker.protocol.weight_messages: Chunk -> WeightChunk
broker.protocol.weight_messages: Fault -> WeightGroupFault
broker.protocol.weight_messages: Gone -> VersionGone
broker.protocol.weight_messages: Later -> SlicePending
broker.protocol.weight_messages: Moved -> VersionReplaced
broker.protocol.weight_messages: Peer -> PeerEndpoint
broker.server.dispatch: Components -> BrokerComponents
broker.server.flow_control: Slot -> RequestSlot
broker.server.lanes: Lane -> RequestLane
broker.server.lanes: Request -> PendingRequest
broker.server.liveness: Peer -> PeerSession
broker.transport.allow_list: Member -> AllowListEntry
actors.capacity: Memory -> KvCacheState
actors.capacity: Room -> ConcurrencyLimit
actors.capacity: Seen -> ActorCounts
actors.capacity: Work -> WorkEstimator
actors.chat: Message -> ChatMessage
actors.engine.choice: Choice -> EngineChoice
actors.engine.engine: Request -> GenerationRequest
actors.engine.torch_engine: Row -> CachedRequest
actors.engine.weights.fill_plan: Part -> StridedView
actors.engine.weights.fill_plan: Piece -> ParameterPiece
actors.engine.weights.live_model: beside -> value_for_card
actors.engine.weights.worker_orders: Answer -> OrderReply
actors.engine.wire_tensors: Place -> VersionFile
actors.engine.wire_tensors: Prepared -> PreparationState
actors.engine_of_settings: Place -> EnginePlacement
actors.environments.adapters.games: Turn -> GameStep
actors.environments.answer_worker: play -> judge_item
actors.environments.base: probe -> item_on_side
actors.environments.calls: Call -> EnvironmentCall
actors.environments.calls: Lane -> EnvironmentLane
actors.environments.calls: Lanes -> EnvironmentLanes
actors.environments.dataset.rows: JsonLines -> JsonLinesRows
actors.environments.dataset.rows: Table -> ArrowRows
actors.episodes.held_leases: Stage -> LeaseStage
actors.episodes.interfaces: Broker -> BrokerApi
actors.episodes.play: Played -> PlayedEpisode
actors.episodes.rollout: Maker -> RolloutContext
actors.episodes.rollout: RolloutFactory -> RolloutContext
actors.episodes.scoring: Gathering -> GroupCollector
actors.loop: Phase -> ActorPhase
actors.loop: unless -> until_event
actors.rewards.frames: Outcome -> RewardOutcome
actors.rewards.frames: Outcomes -> RewardOutcomes
actors.rewards.judge: Scores -> ScoreCache
actors.rewards.process: Death -> WorkerExit
actors.rewards.worker: Caller -> RewardCaller
actors.sandbox.remote_calls: Calls -> ProgramConnection
actors.sandbox.remote_calls: Remote -> RemoteObject
actors.sandbox.sandbox: Outcome -> ProgramResult
actors.weights.exact: Sides -> Float32Differences
actors.weights.links: Caller -> ActorIdentity
actors.weights.probe: Difference -> LogprobDifference
actors.weights.sources: Source -> PullSource
learner.algorithm.advantages: Outcomes -> BatchRewards
learner.algorithm.aggregations: Counts -> MinibatchSize
learner.algorithm.catalogue: Choice -> ChoiceSetting
learner.algorithm.microbatch: Prepared -> PreparedMicrobatch
learner.algorithm.microbatch: Run -> UniformSequences
learner.algorithm.microbatch: Seen -> AttendedTokens
learner.checkpointing.tensors: Part -> CheckpointedModel
learner.checkpointing.tensors: Piece -> TensorShard
learner.coordinator: Components -> RankComponents
learner.coordinator: Follower -> FollowerRank
learner.data.dealing: Place -> SequencePlacement
learner.data.evaluation: Answer -> EvaluationAnswer
learner.data.evaluation: Evaluation -> EvaluationResult
learner.data.grades: Metric -> AnswerMetric
learner.data.ledger: Facts -> LedgerSnapshot
learner.data.retrying_store: GoneAtStop -> SuppressUnreachableStore
learner.launch: Meeting -> Rendezvous
learner.launch: Share -> MachineRanks
learner.model.logits: Chunk -> LogitChunk
learner.model.logits: Slopes -> LossDerivatives
learner.model.output_layer: Scores -> ScoresWithoutLoss
learner.model.policy: Scores -> TokenScores
learner.model.sequence_parallel: Cut -> SequenceSplit
learner.profiling: Measured -> PhaseMeasurements
learner.reporting.advice.advisor_thread: Seen -> MeasuredBatch
learner.reporting.run_snapshot: Bulletin -> RunSnapshot
learner.reporting.run_snapshot: Curve -> DownsampledSeries
learner.reporting.figures: Line -> ChartLine
learner.reporting.samples: Turn -> SampleTurn
learner.reporting.trackers.tracker: Point -> TrackedFigures
learner.several_machines: Lines -> NodeConnection
learner.several_machines: Lost -> ConnectionLost
learner.several_machines: Member -> RemoteNode
learner.weights.epochs: Phase -> EpochPhase
learner.weights.log: Sent -> VersionDelivery
learner.weights.memory: Slot -> WeightSlot
learner.weights.memory: Slots -> WeightSlots
learner.weights.updates: Change -> WeightChange
learner.weights.updates: Form -> BroadcastPayload
console.display.progress: Stage -> ProcessStage
console.display.snapshot: Fill -> GroupsInFlight
console.doctor.command: Finding -> CheckResult
console.doctor.command: Grade -> CheckStatus
console.report.curve_charts: Curve -> ChartCurve
console.report.curves: Evaluation -> EvaluationFigures
console.report.curves: Presence -> ActorBatchRange
console.report.drawing: Spot -> Tooltip
console.report.record: Answer -> GreedyAnswer
console.report.record: Change -> AnswerChange
console.report.record: Changes -> AnswerChanges
console.report.record: End -> IncarnationEnd
console.report.record: Life -> ActorIncarnation
console.report.record: Run -> ReportedRun
console.report.run_charts: Since -> TimeAxis
console.report.sections: Row -> ReportRow
console.report.sections: Table -> CurveTable
console.run.checks.check: Doubt -> CheckWarning
console.run.fork_server: Line -> ForkServerConnection
console.run.supervisor: Outcome -> RunOutcome
console.samples.answers: Answer -> PromptCompletion
console.samples.query: Found -> SampleSelection
console.sweep.grid: Outcome -> SweepRunProgress
console.sweep.grid: Point -> SweepPoint
console.sweep.sweep: Source -> PointSource
console.verbs.compare: Course -> LearningCurve
console.verbs.compare: Difference -> ScoreDifference
console.verbs.compare: Graded -> EvaluationGrades
console.verbs.compare: Reached -> TimeToScore
console.verbs.data: Count -> TokenCounters
console.verbs.data: Finding -> DataFinding
console.verbs.env: Model -> LoadedModel
console.verbs.env: Policy -> PolicyKind
console.verbs.evaluate: Graded -> GradedAnswer
console.verbs.messages: Found -> ModuleMessage
console.verbs.messages: Message -> ExplainedMessage
console.verbs.tables: Facts -> ResultTable
lab.command: Choices -> ChaosOptions
lab.endurance.endurance: Endured -> EnduranceResult
lab.endurance.growth: Growth -> ResourceSampler
lab.endurance.growth: Whole -> ResourceCounts
lab.endurance.lies: Lies -> ForgedRequests
lab.live_run: Stuck -> ExpectationFailed
lab.pair_case: Meeting -> PairProgress
lab.pair_case: Turns -> TurnLock
lab.task_trace: Growth -> TokenGrowth
"""


def _chapters() -> Iterator[tuple[str, list[str]]]:
    for chapter in re.findall(r"^\S.*\n(?: .*\n)+", CHAPTERS, re.MULTILINE):
        new, *parts = chapter.split()
        yield new, parts


PARTS: Mapping[str, list[str]] = dict(_chapters())
MOVED: Mapping[str, str] = {old: new for new, parts in PARTS.items() for old in parts}
"""Module before -> module now."""

NAMES: Mapping[tuple[str, str], str] = {
    (module, old): new
    for module, old, new in re.findall(r"^(\S+): (\w+) -> (\w+)$", NAMES_OF_MODULES, re.MULTILINE)
}
"""(module now, name before) -> name now."""
HOLDERS = {module for module, _ in NAMES}
PLACES = {**FOLDERS, **MOVED}
_ROOM = "|".join(sorted({name.split(".")[0] for name in (*MOVED, *PARTS)}))
_DOTTED = re.compile(rf"(?<![\w./-])(?:{_ROOM})(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(rf"(?:(?<=\.\./)|(?<![\w./-]))(?:{_ROOM})(?:/\w+)+(?:\.py\b)?")


def rewritten(text: str, *, python: bool) -> str:
    """Return a file's text with the places that modules have now."""
    if not python:
        return _names(text)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    edits: list[tuple[int, int, str]] = []
    tree = ast.parse(text)
    renamed: dict[str, str] = {}
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            new = _import(node, tree, renamed)
            span = (
                place(node.lineno, node.col_offset),
                place(node.end_lineno or 0, node.end_col_offset or 0),
            )
            edits.append((*span, text[slice(*span)] if new is None else new))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = _name_now(modules.get(node.value.id, ""), node.attr)
            if name != node.attr and node.end_lineno and node.end_col_offset:
                end = place(node.end_lineno, node.end_col_offset)
                edits.append((end - len(node.attr), end, name))
        elif isinstance(node, ast.Name) and node.id in renamed:
            start = place(node.lineno, node.col_offset)
            edits.append((start, start + len(node.id), renamed[node.id]))
    return _edited(text, edits)


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Put pieces in their places; the text between them has its names rewritten."""
    pieces, end = [], 0
    for start, stop, new in sorted(edits):
        pieces += [_names(text[end:start]), new]
        end = stop
    return "".join([*pieces, _names(text[end:])])


def _import(node: ast.ImportFrom, tree: ast.Module, renamed: dict[str, str]) -> str | None:
    """Write an import anew; None where it may stay."""
    assert node.module
    groups: dict[str, list[str]] = {}
    for alias in node.names:
        full, bound = f"{node.module}.{alias.name}", alias.asname or alias.name
        if full in MOVED:
            module, _, name = MOVED[full].rpartition(".")
        else:
            module = MOVED.get(node.module, node.module)
            name = _name_now(node.module, alias.name)
        if alias.asname is None and name != bound and _is_free(name, bound, tree):
            renamed[bound] = bound = name
        group = groups.setdefault(module, [])
        group += {name if name == bound else f"{name} as {bound}"} - set(group)
    if groups == {node.module: [ast.unparse(alias) for alias in node.names]}:
        return None
    indent = "\n" + " " * node.col_offset
    return indent.join(f"from {m} import {', '.join(names)}" for m, names in groups.items())


def _name_now(module: str, name: str) -> str:
    """Return what a name of a module, at its place before or now, is called now."""
    name = RENAMED.get((module, name), name)
    return NAMES.get((MOVED.get(module, module), name), name)


def _is_free(name: str, before: str, tree: ast.Module) -> bool:
    """Return whether an import can be called `name` wherever it was `before` in this file."""
    nodes = list(ast.walk(tree))
    bound = _assigned(tree) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return before not in bound and name not in bound | used | named


def _assigned(tree: ast.Module) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _names(text: str) -> str:
    """Rewrite dotted names and paths."""

    def dotted(match: re.Match[str]) -> str:
        return ".".join(_moved(match[0].split(".")))

    def path(match: re.Match[str]) -> str:
        is_file = match[0].endswith(".py")
        parts = match[0].removesuffix(".py").split("/")
        return "/".join(_moved(parts)) + ".py" * is_file

    return _PATH.sub(path, _DOTTED.sub(dotted, text))


def _moved(parts: list[str]) -> list[str]:
    for end in range(len(parts), 1, -1):
        old = ".".join(parts[:end])
        if old in PLACES or old in HOLDERS:
            rest = parts[end:]
            if rest:
                rest[0] = _name_now(old, rest[0])
            return [*PLACES.get(old, old).split("."), *rest]
    return parts


def unresolved(path: Path, root: Path = ROOT) -> list[str]:
    """Name imports from rooms of Nyala, in one file, that find neither a module nor a name."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names: list[tuple[str, str | None]] = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        missing += [
            f"{path}:{node.lineno}: {module}" + (f".{name}" if name else "")
            for module, name in names
            if module.split(".")[0] in ROOMS and not _is_there(root, module, name)
        ]
    return missing


def _is_there(root: Path, module: str, name: str | None) -> bool:
    base = root.joinpath(*module.split("."))
    files = [file for file in (base / "__init__.py", base.with_suffix(".py")) if file.exists()]
    if name is None or not files:
        return bool(files)
    if (base / f"{name}.py").exists() or (base / name).is_dir() or name == "*":
        return True
    return name in _defined(files[0])


@cache
def _defined(path: Path) -> frozenset[str]:
    """Names that a module has: what it defines, assigns and imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(_assigned(tree)) | {
        node.name if not isinstance(node, ast.alias) else node.asname or node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias)
    }


def main(arguments: list[str]) -> int:
    """Rewrite the files of a folder, or check them."""
    check = "--check" in arguments
    (folder,) = (argument for argument in arguments if argument != "--check")
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    python = [path for path in files if path.suffix == ".py"]
    if check:
        missing = [line for path in python for line in unresolved(path)]
        print("\n".join(missing) or "every import resolves")
        return 1 if missing else 0
    for path in files:
        if path.suffix in {".py", *TEXTS}:
            before = path.read_text(encoding="utf-8")
            after = rewritten(before, python=path.suffix == ".py")
            if after != before:
                path.write_text(after, encoding="utf-8")
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
