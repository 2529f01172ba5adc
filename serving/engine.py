"""The engine: continuous batching, in which requests arrive and finish while others are being served.

Under tensor parallelism every rank creates an engine. Rank 0 accepts requests, schedules and samples; the others call
:meth:`Engine.follow` and compute the steps that rank 0 sends (``runner.py``).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.runtime import sealing
from ..kernels.runtime.checks import check_impl, whole_number
from ..kernels.runtime.dtypes import CACHE_NAMES, QUANTISED
from ..kernels.runtime.names import expected
from ..kernels.runtime.sealing import SealBroken
from ..layers.attention.paged import default_block_size
from ..layers.trial import trial
from ..parallel.core.collectives import CollectiveError
from ..parallel.core.mesh import MeshLike
from .admission import Admission
from .allocator import BlockAllocator
from .chat import ChatFormat
from .generation import GenerationDefaults, eos_token_ids
from .guiding import Guides, wait_for
from .host_space import HostSpace
from .models import ServableModel, as_servable, bare
from .outcome import New, draw, event_of
from .ranks import RanksLost
from .request import Finish, Request, SequenceState, TokenEvent
from .runner import Runner
from .sampling import LogitsNotFinite, Sampled
from .sampling_params import SamplingParams
from .scheduler import Chunk, Scheduler
from .stats import EngineLoad, EngineStats
from .text import AnswerText, Decoders, Tokenizer
from .weight_check import check_weights

if TYPE_CHECKING:
    from .chat_answer import ChatAnswer

KV_DTYPES = {CACHE_NAMES[dtype]: dtype for dtype in QUANTISED}


class Engine:
    """Serves ``model`` to any number of requests through one paged KV cache.

        engine = Engine(model, num_blocks=256)
        engine.add(Request(prompt, max_new_tokens=32))
        for event in engine.run():
            print(event.request, event.token)

    Args:
        model: a ``ParallelTransformer``, a causal language model of transformers, fused or stock, or a module like
            :class:`~shardfuse.serving.models.ServableModel`; call ``model.eval()`` first if it has dropout.
        num_blocks: of the cache.
        block_size: token slots of each; default 256 on a CPU and 16 on a GPU.
        max_num_seqs: the most requests that run at once.
        max_model_len: the longest prompt and answer together; default the model's ``max_positions``. The cache bounds
            it as well.
        max_num_batched_tokens: tokens per step, over all requests; longer prompts are computed in several steps.
        kv_dtype: of the cache, ``"fp8"`` (e4m3) or ``"int8"`` with a scale for each token and head; None: the model's.
        prefix_caching: whether requests that begin alike share the keys and values of their first full blocks, also
            after the first of them has ended.
        max_queued_requests, max_queued_tokens: the most answers that wait, and the most tokens of them and their
            prompts. :meth:`add` refuses more with :class:`QueueFull`, but neither a request that finds an empty queue
            nor a client with less than its share (``admission.py``). None: no limit.
        max_overtakes: how many later requests of the same client with better priority may overtake a request, beside
            those that it found waiting; ``clients.py`` has the exact rule.
        num_host_blocks: blocks in host memory, on every rank, for the keys and values of preempted requests. The engine
            brings these back if that is faster than recomputing them (``host_space.py``).
        enforce_eager: whether the model's own Python runs in every step. Otherwise steps without prefill replay
            captured graphs on a GPU (``graphs.py``), or recorded ops on a CPU if one process holds the model
            (``recording.py``).
        invariant: whether every bit of a request's answer is independent of the other requests in its steps, of the
            division of its prompt into chunks, of preemption and of the prefix cache. This costs speed. On a GPU every
            matrix product and attention then computes a token the same way in any batch
            (``kernels.runtime.dispatch.row_invariance``); on a CPU the model runs over windows of one shape, in one
            thread (``windows.py``). Roundings still differ between numbers of ranks, processors, libraries and dtypes.
        impl: of the paged attention and the cache write; see ``kernels/runtime/dispatch.py``.
        tokenizer: the model's tokenizer, of ``tokenizers`` or transformers, or any object with ``decode(ids) -> str``.
            With it events carry text, and requests may have stop strings and guides; one of transformers with a chat
            template also allows :meth:`chat`.
        generation: the model's settings for generation; None: those that it carries. Answers end at their
            ``eos_token_ids``, or else at the config's; their other defaults are a server's to apply.
        guide_timeout_s: processor time in which a guide must compile. Compiling is tried in another process first, so
            that a guide which needs more ends its own request only.
        guide_memory_mib: memory of all guides together, those in use, those that compile and those kept for later. A
            guide may take a quarter of what those in use leave.

    ``stats`` is an :class:`EngineStats`. Raises ValueError for sizes that cannot work and for a weight that is NaN,
    TypeError for another kind of model or tokenizer.
    """

    def __init__(
        self,
        model: ServableModel | torch.nn.Module,
        *,
        num_blocks: int,
        block_size: int | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        kv_dtype: str | None = None,
        prefix_caching: bool = True,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        max_overtakes: int = 64,
        num_host_blocks: int = 0,
        enforce_eager: bool = False,
        invariant: bool = False,
        impl: str = "auto",
        tokenizer: Tokenizer | None = None,
        generation: GenerationDefaults | None = None,
        guide_timeout_s: float = 10.0,
        guide_memory_mib: int = 1024,
    ) -> None:
        check_impl(impl)
        self.model = model = as_servable(model)
        self._generation = generation
        self.eos_token_ids = eos_token_ids(bare(model)) if generation is None else generation.eos_token_ids
        config = model.config
        limit = config.max_positions if max_model_len is None else whole_number("Engine: max_model_len", max_model_len)
        if not 1 < limit <= config.max_positions:
            raise ValueError(
                f"Engine: max_model_len={limit}: expected 2 to {config.max_positions}, the positions that the model has"
            )
        self.stats = EngineStats()
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"Engine: kv_dtype={kv_dtype!r}: {expected(kv_dtype, KV_DTYPES, 'expected None or one of')}"
            )
        weight = next(iter(model.parameters()))
        if weight.is_meta:
            raise ValueError("Engine: the model is on the meta device: load its weights first, say with load_hf")
        block_size = default_block_size(weight.device) if block_size is None else block_size
        self._allocator = BlockAllocator(num_blocks, block_size)
        self.max_model_len = min(limit, num_blocks * block_size + 1)  # the last token never enters the cache
        self._host = HostSpace(num_host_blocks, lambda: self.stats.prefill_token_seconds)
        self._scheduler = Scheduler(
            self._allocator,
            host=self._host,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            max_overtakes=max_overtakes,
        )
        cache_options: dict[str, Any] = {
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "v_head_dim": getattr(config, "v_head_dim", None),
            "block_size": block_size,
            "dtype": weight.dtype if kv_dtype is None else KV_DTYPES[kv_dtype],
            "mesh": model.group,
            "device": weight.device,
        }
        self._runner = Runner(
            model,
            self._allocator,
            cache_options,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=min(limit, num_blocks * block_size),
            num_host_blocks=num_host_blocks,
            enforce_eager=enforce_eager,
            invariant=invariant,
            impl=impl,
        )
        self.max_queued_requests = max_queued_requests
        self._open = False
        self._leads = model.group.rank == 0
        self._lost: RanksLost | None = None
        self._paused = False
        self._tokenizer = tokenizer
        self._decoders = None if tokenizer is None else Decoders(tokenizer)
        self._chats: ChatFormat | None = None
        memory = whole_number("Engine: guide_memory_mib", guide_memory_mib) << 20
        self._guides = Guides(tokenizer, config.vocab_size, guide_timeout_s, memory)
        self._admission = Admission(
            self._allocator,
            vocab_size=config.vocab_size,
            max_model_len=self.max_model_len,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            guides=None if tokenizer is None else self._guides,
        )
        self._clock = 0  # steps taken, including idle ones
        self._next_id = 0
        self._next_sequence = 0
        self._live: dict[int, list[SequenceState]] = {}  # the unfinished answers of each request
        self._deadlines: list[tuple[float, int]] = []  # heap of (when, id), by time.monotonic()
        self._cancelled: list[TokenEvent] = []  # to be reported by the next step
        self._one_by_one = False  # whether the next step computes each sequence by itself, to find the one that fails
        self.open()

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], mesh: MeshLike = None, **options: Any) -> Engine:
        """The engine of a folder of transformers: model, tokenizer, settings for generation, and as many blocks as the
        memory holds.

            engine = Engine.from_pretrained("folder")
            for text in engine.chat([{"role": "user", "content": "Name three colours."}]):
                print(text, end="", flush=True)

        Args:
            folder: ``config.json``, weights in safetensors, and a tokenizer.
            mesh: tensor-parallel ranks. All of them call this; those but rank 0 then call :meth:`follow`.
            options: ``dtype`` ("fp32", "bf16" or "fp16"; default the folder's), ``device`` ("cpu" or "cuda"),
                ``cache_gib`` (of keys and values on each rank), and the other fields of
                :class:`~shardfuse.serving.folder_options.FolderOptions`.

        The model becomes a :class:`ParallelTransformer` where possible; any other one is transformers' own, fused.

        Raises ImportError without transformers; FileNotFoundError for a missing folder or file; ValueError for a folder
        that cannot be read, a model that cannot be served, or sizes that cannot work; TypeError for an unknown option.
        """
        from .folder import open_folder
        from .folder_options import FolderOptions

        return open_folder(FolderOptions.of(folder, options), mesh).engine

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Allocate the cache's memory if it is missing. A new engine is open."""
        if not self._open:
            self._runner.open()
            self._host.block_seconds = self._runner.block_seconds()
            self._open = True

    def close(self) -> None:
        """End every request, without events, and free the cache's memory; :meth:`open` allocates it again.

        A ``with`` block does both. The model does not change. On rank 0 it also ends the other ranks' :meth:`follow`.
        """
        try:
            if self._open and self._leads and self._lost is None:
                self._runner.dismiss()
        finally:
            self._free()

    def _free(self) -> None:
        for number in list(self._live):
            self._end(number, "cancelled")
        self._cancelled.clear()
        self._deadlines.clear()
        self._allocator.forget()
        self._guides.close()
        self._runner.close()
        self._open = False

    def warmup(self, progress: Callable[[str], object] | None = None) -> None:
        """Run a step of every size once, so that all compilation, capture and allocation is done.

        This method calls ``progress`` with each size before it runs. Raises RuntimeError while requests are being
        served.
        """
        self._check_open("warmup")
        self._check_leads("warmup")
        if self._live:
            raise RuntimeError("warmup: requests are being served; warm up before the first one")
        with trial(bare(self.model)):
            for what in self._runner.warm_up():
                if progress is not None:
                    progress(what)
        self._runner.rest()

    @contextlib.contextmanager
    def sealed(self) -> Iterator[None]:
        """Within the block, a step that would compile a kernel, capture a graph, pack a weight or allocate GPU memory
        fails its requests with a SealBroken that names the cause and its sizes. See :meth:`warmup`.
        """
        with sealing.sealed(), self._runner.memory_sealed():
            yield

    def follow(self) -> None:
        """On every rank but 0: compute the steps of rank 0's engine, until that is closed or calls :meth:`dismiss`.

        Raises RanksLost if rank 0 has ended, or sends nothing in time while requests are live; ValueError on rank 0.
        """
        if self._leads:
            raise ValueError("follow: this is rank 0, which takes the requests: the other ranks follow it")
        self._check_open("follow")
        self._runner.follow()

    def dismiss(self) -> None:
        """On rank 0: make the other ranks' :meth:`follow` return, for training, say. No request may be live."""
        if self.busy:
            raise RuntimeError("dismiss: requests are being served; take steps until none is left, or cancel() them")
        self._check_leads("dismiss")
        self._runner.dismiss()

    def limit_waits(self, timeout: timedelta) -> None:
        """From now on, give up the other ranks after ``timeout`` if the mesh's own is longer, on this rank only.
        Opening and warming up may take minutes; a step does not.
        """
        self._runner.channel.limit(timeout)

    def _check_leads(self, what: str) -> None:
        if not self._leads:
            raise RuntimeError(f"{what}: this is rank {self.model.group.rank}: rank 0 takes the requests; follow() it")

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise RuntimeError(f"{what}: the engine is closed: open() it, or use it within its with block")

    def pause(self) -> None:
        """Compute nothing until :meth:`resume`; steps then only report requests that were cancelled or timed out."""
        self._paused = True
        self._rest()

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._paused = False

    @property
    def opened(self) -> bool:
        """Whether the engine has its cache: from its construction, and from :meth:`open`, to :meth:`close`."""
        return self._open

    @property
    def paused(self) -> bool:
        """Whether :meth:`pause` was called since the last :meth:`resume`."""
        return self._paused

    def update_weights(self, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Continue with new weights: load ``state`` into the model, or without it use the model's present weights.

        The engine has no copy of the model's parameters: a trainer may write to them between steps and then call this
        method. Answers keep their tokens; the engine recomputes keys and values of running requests and shares no block
        of earlier weights. Over several ranks all call it, after :meth:`dismiss`.

        Raises RuntimeError if ``state`` does not fit the model, some of whose weights may then have changed, or if the
        other ranks still follow this one; ValueError if a weight is NaN, which then stays so.
        """
        if self._leads and self.model.group.size > 1 and self._runner.followed and self._open:
            raise RuntimeError(
                "update_weights: the other ranks follow this one, with their own weights: dismiss() them first, and "
                "call it on every rank"
            )
        try:
            if state is not None:
                self.model.load_state_dict(state)
        finally:
            self._runner.new_weights()
            self._scheduler.new_weights()
        check_weights(bare(self.model), self.model.group)

    @property
    def generation(self) -> GenerationDefaults:
        """The model's settings for generation, of which the engine itself uses ``eos_token_ids``.

        Raises ValueError for values of the wrong type or out of range.
        """
        if self._generation is None:
            self._generation = GenerationDefaults.of_model(bare(self.model))
        return self._generation

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, running or yet to arrive, or any event is unreported."""
        return bool(self._live or self._cancelled)

    @property
    def load(self) -> EngineLoad:
        """The numbers of running answers and of waiting or future ones, and the blocks that they own."""
        clients = self._scheduler.clients
        waiting = clients.num_waiting + len(clients.coming)
        return EngineLoad(clients.num_running, waiting, self._allocator.used_blocks, self._allocator.num_blocks)

    def add(self, request: Request) -> int:
        """Queue ``request``; returns its number, which its events carry.

        Raises ValueError, and changes nothing, for a request that cannot be served: an empty or over-long prompt, a
        token outside the vocabulary, more blocks than exist, a field of the wrong type or out of range; QueueFull if
        the engine could serve it later; RanksLost after a rank was lost; RuntimeError on ranks other than 0, and if the
        engine is closed.
        """
        return self.add_all([request])[0]

    def add_all(self, requests: Sequence[Request]) -> list[int]:
        """:meth:`add` for each of ``requests``, or for none if one of them raises; the queue's limits count them as
        one request with all their answers.
        """
        self._check_open("add")
        self._check_leads("add")
        if self._lost is not None:
            raise self._lost
        for request in requests:
            self._admission.check(request)
        self._admission.check_queue(requests, self._scheduler.clients)
        sequences = [self._sequence(number, request) for number, request in enumerate(requests, self._next_id)]
        self._next_id += len(sequences)
        for sequence in sequences:
            self._live[sequence.number] = [sequence]
            self._scheduler.clients.expect(sequence, max(sequence.request.arrival, self._clock))
            if (limit := sequence.request.timeout_s) is not None:
                heapq.heappush(self._deadlines, (time.monotonic() + limit, sequence.number))
        return [sequence.number for sequence in sequences]

    def _sequence(self, number: int, request: Request) -> SequenceState:
        text, stop = self._text(request), request.stops(self.eos_token_ids)
        sequence = SequenceState(self._sequence_id(), request, list(request.prompt), number, text=text, stop=stop)
        if request.sampling.guide is not None:
            sequence.guide = self._guides.start(request.sampling.guide, stop)
        return sequence

    def _text(self, request: Request) -> AnswerText | None:
        """The decoder of an answer's tokens; None without a tokenizer."""
        if self._decoders is None:
            return None
        decode, least = self._decoders.of(request.visible_tokens), request.sampling.min_tokens
        return AnswerText(decode, request.stop_strings, request.include_stop_str_in_output, least)

    def _sequence_id(self) -> int:
        self._next_sequence += 1
        return self._next_sequence

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that cannot be served, as :meth:`add` does."""
        self._admission.check(request)

    def _drop(self, number: int) -> list[TokenEvent]:
        """Cancel request ``number`` without a step; returns its unreported events, which no step reports then."""
        lived = self._end(number, "cancelled")
        mine = [event for event in self._cancelled if event.request == number]
        self._cancelled = [event for event in self._cancelled if event.request != number]
        if lived:
            self._rest()
        return mine

    def _give_back(self, events: Sequence[TokenEvent]) -> None:
        """Let the next step report ``events``, which were meant for another reader."""
        self._cancelled[:0] = events

    def lives(self, number: int) -> bool:
        """Whether request ``number`` has an unfinished answer."""
        return number in self._live

    def cancel(self, number: int) -> bool:
        """Cancel request ``number`` and free its blocks; the next step reports its end.

        Returns False if it has already ended; raises ValueError for a number that was never returned by :meth:`add`.
        """
        if not isinstance(number, int) or not 0 <= number < self._next_id:
            raise ValueError(f"cancel: there is no request {number!r}; {self._next_id} were added")
        return self._end(number, "cancelled")

    def _end(self, number: int, why: Finish, error: Exception | None = None) -> bool:
        """Free a request's blocks and let the next step report its end; False if it has already ended."""
        sequences = self._live.pop(number, [])
        for sequence in sequences:
            self._scheduler.remove(sequence)
            if sequence.guide is not None:
                sequence.guide.leave()
            self._cancelled.append(TokenEvent(number, None, why, error, text=sequence.rest(), index=sequence.index))
        return bool(sequences)

    def step(self) -> list[TokenEvent]:
        """Admit requests, compute one batch, retire finished ones; returns the new tokens, in order of admission.

        A sequence that fails, in the model or in sampling, ends with an event that carries the error, LogitsNotFinite
        for logits that are NaN or infinite; other sequences are unaffected. If a failure belongs to no single sequence,
        the step fails as a whole and raises. No token is lost then: the next step computes the same tokens again, one
        sequence at a time, and ends the sequences that fail again.

        If a rank has ended, or does not answer within the mesh's timeout, every request ends with an event whose error
        is a RanksLost, and the engine accepts no more requests.
        """
        self._check_leads("step")
        self._arrive()
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            self._end(heapq.heappop(self._deadlines)[1], "timeout")
        began = time.perf_counter()
        try:
            self._copy()  # left by a step that failed
        except (RanksLost, CollectiveError) as error:
            return self._lose(error)
        chunks = [] if self._paused else self._scheduler.schedule()
        generated = []
        if chunks:
            try:
                with self._runner.invariance():
                    sampled = self._compute(chunks)
            except (RanksLost, CollectiveError) as error:
                return self._lose(error)
            tokens = sum([new.what.__class__ is Sampled for news in sampled for new in news])
            self._count(chunks, tokens, time.perf_counter() - began)
            generated = self._advance(chunks, sampled)
        self._clock += 1
        if not self._live:
            self._deadlines.clear()
        try:
            self._rest()
        except RanksLost as error:
            return generated + self._lose(error)
        cancelled, self._cancelled = self._cancelled, []
        return cancelled + generated

    def _arrive(self) -> None:
        """Pass the sequences that have arrived to the scheduler, except those whose guide is still being compiled."""
        clients, waiting = self._scheduler.clients, []
        for sequence in clients.arrived(self._clock):
            if sequence.guide is not None and not sequence.guide.ready:
                clients.expect(sequence, self._clock + 1)
                waiting.append(sequence.guide)
                continue
            self._scheduler.add(sequence)
            if sequence.guide is not None and (error := sequence.guide.begin()) is not None:
                self._end(sequence.number, "error", error)
        if waiting and not (clients.num_running or clients.num_waiting or self._cancelled):
            wait_for(waiting)

    def run(self) -> Iterator[TokenEvent]:
        """Step until no request is left, yielding each event as it comes; requests may be added meanwhile.

        Raises RuntimeError while the engine is paused, since it would not end.
        """
        while self.busy:
            if self._paused:
                raise RuntimeError("run: the engine is paused, and requests wait: call resume() first")
            yield from self.step()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve ``requests`` to the end; return the generated tokens of each, with ``n`` > 1 answer after answer.

        Raises RuntimeError while other requests are being served (their events would be lost), and if one of
        ``requests`` fails; ValueError, serving none, if one of them cannot be served. The engine is idle afterwards.
        """
        if self.busy:
            raise RuntimeError("generate: other requests are being served; add() these and read run() instead")
        numbers = self.add_all(requests)
        answers: dict[tuple[int, int], list[int]] = {
            (number, i): [] for number, each in zip(numbers, requests) for i in range(each.n)
        }
        try:
            for event in self.run():
                if event.error is not None:
                    position = numbers.index(event.request)
                    raise RuntimeError(f"generate: requests[{position}] failed: {event.error}") from event.error
                if event.token is not None:
                    answers[event.request, event.index].append(event.token)
        finally:
            for number in list(self._live):
                self.cancel(number)
            self._cancelled.clear()
            self._rest()
        return list(answers.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """The answer to ``messages`` by the model's chat template; iterate over it for its text as it comes.

        Args:
            messages: of OpenAI's form, with text alone.
            tools: that the model may call, of OpenAI's form; the answer's ``message`` holds the calls.
            max_new_tokens: None: the model's own setting, else as many as there is room for.
            sampling: None: the model's own settings, as transformers' ``generate`` applies them.
            chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.

        Raises ValueError for a model without a chat template, messages or tools that it refuses, a chat without room
        for an answer, and options out of range; RuntimeError while other requests are being served, and as
        :meth:`add` does.
        """
        from . import chat_answer

        self._check_open("chat")
        self._check_leads("chat")
        if self._chats is None:
            if not callable(getattr(self._tokenizer, "apply_chat_template", None)):
                raise ValueError("chat: the engine needs a tokenizer of transformers: Engine(model, tokenizer=...)")
            self._chats = ChatFormat(self._tokenizer, self.model.config.vocab_size, self.eos_token_ids)
        more = chat_template_kwargs or {}
        return chat_answer.begin(self, self._tokenizer, self._chats, messages, tools, max_new_tokens, sampling, more)

    def _compute(self, chunks: Sequence[Chunk]) -> list[list[New]]:
        """The outcomes of each chunk: none if it does not sample, a token for each answer, or a sequence's error."""
        self._copy()
        if not self._one_by_one:
            try:
                logits = self._runner.logits(chunks)
            except (RanksLost, CollectiveError):
                raise
            except SealBroken as error:
                self._runner.recover()
                return [[New(chunk.sequence, error)] for chunk in chunks]
            except Exception:
                self._one_by_one = True
                self._runner.recover()
                if not any(isinstance(new.what, Exception) for chunk in chunks for new in self._alone(chunk)):
                    raise
            else:
                return self._choose(logits, chunks)
        self._one_by_one = False
        return [self._alone(chunk) for chunk in chunks]

    def _copy(self) -> None:
        """Make the block copies that the scheduler requests. If that fails, the next step tries again."""
        try:
            if copies := self._scheduler.copies():
                self._runner.copy_blocks(copies)
        except (RanksLost, CollectiveError):
            raise
        except Exception:
            self._runner.recover()
            raise
        self._scheduler.copied()

    def _alone(self, chunk: Chunk) -> list[New]:
        """The outcomes of a chunk computed by itself; repeatable, since no draw depends on an earlier one."""
        try:
            logits = self._runner.logits([chunk])
        except (RanksLost, CollectiveError):
            raise
        except Exception as error:
            self._runner.recover()
            return [New(chunk.sequence, error)]
        return self._choose(logits, [chunk])[0]

    def _choose(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[list[New]]:
        """Draw from logits [S, V] of the chunks that sample; several answers begin with draws from the same row."""
        every = [chunk.sequence for chunk in chunks if chunk.samples]
        if all([each.request.n == 1 for each in every]):  # noqa: C419 - a generator takes longer
            found = iter(draw(logits, every) if every else [])
            return [[New(chunk.sequence, next(found))] if chunk.samples else [] for chunk in chunks]
        answers = [self._answers(chunk.sequence) if chunk.samples else [] for chunk in chunks]
        every = [sequence for each in answers for sequence in each]
        if len(every) > len(logits):
            rows = [row for row, each in enumerate(filter(None, answers)) for _ in each]
            logits = logits[torch.tensor(rows, device=logits.device)]
        found = iter(draw(logits, every))
        return [[New(sequence, next(found)) for sequence in each] for each in answers]

    def _answers(self, sequence: SequenceState) -> list[SequenceState]:
        """``sequence`` and, before the first token of a request with ``n`` > 1, the other answers, not queued yet."""
        if sequence.generated or sequence.request.n == 1:
            return [sequence]
        others = [sequence.fork(self._sequence_id(), index) for index in range(1, sequence.request.n)]
        for other in others:
            other.text = self._text(other.request)
        return [sequence, *others]

    def _lose(self, error: Exception) -> list[TokenEvent]:
        """End every request: a rank is gone."""
        self._lost = error if isinstance(error, RanksLost) else RanksLost(f"a rank of the model was lost: {error}")
        self._lost.__cause__ = error
        for number in list(self._live):
            self._end(number, "error")
        events, self._cancelled = self._cancelled, []
        return [replace(event, error=self._lost) if event.finish == "error" else event for event in events]

    def _rest(self) -> None:
        """Tell the other ranks if nothing is left to compute."""
        if (self._paused or not self._live) and self._lost is None:
            self._runner.rest()

    def _advance(self, chunks: Sequence[Chunk], sampled: Sequence[list[New]]) -> list[TokenEvent]:
        """Append the step's tokens to their sequences; retire complete and failed ones."""
        events = []
        for chunk, news in zip(chunks, sampled):
            lead = chunk.sequence
            if not (news and news[0].sequence is lead and isinstance(news[0].what, Exception)):
                self._scheduler.advance(chunk)
            for sequence, _ in news if len(news) > 1 else ():
                if sequence is not lead:
                    self._live[lead.number].append(sequence)
                    self._scheduler.fork(lead, sequence)
            for sequence, new in news:
                event = event_of(sequence, new)
                if event.error is not None and isinstance(event.error, LogitsNotFinite):  # its keys may be NaN
                    self._scheduler.distrust(sequence)
                    self.stats.not_finite += 1
                if event.finish is not None:
                    self._retire(sequence)
                events.append(event)
        return events

    def _retire(self, sequence: SequenceState) -> None:
        self._scheduler.remove(sequence)
        if sequence.guide is not None:
            sequence.guide.leave()
        others = self._live[sequence.number]
        others.remove(sequence)
        if not others:
            del self._live[sequence.number]

    def _count(self, chunks: Sequence[Chunk], generated: int, seconds: float) -> None:
        """Add one step that ``generated`` so many tokens to the statistics, before the tokens are appended."""
        stats, allocator = self.stats, self._allocator
        filling = [chunk for chunk in chunks if not chunk.decodes]
        prefill = sum([chunk.length for chunk in filling])
        stats.count_step(prefill + generated)
        stats.generated_tokens += generated
        stats.prefill_tokens += prefill
        stats.recomputed_tokens += sum([chunk.recomputed for chunk in filling])
        if prefill:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
            stats.decode_tokens += generated
        stats.preemptions = self._scheduler.preemptions
        stats.kept_tokens = self._scheduler.kept_tokens
        stats.shared_tokens = self._scheduler.shared_tokens
        stats.peak_seqs = max(stats.peak_seqs, len(chunks))
        stats.peak_blocks = allocator.peak_blocks
        stats.slot_steps += allocator.allocated_slots
        stats.unused_slot_steps += allocator.unused_slots
