"""Long histories of engines that are known to be honest, or to hang, and what is said of them.

Theory of operation
===================

A detector is only as good as what it was tried on, and recorded logs of real fleets are few, short,
and never say what was true. So a model of the servers is run, in virtual time, from a seed: days of
requests, prefills, decoding, sleep, weight updates, restarts and slow disks. What the daemon's
children would have seen of it goes to the detector, by witness; the model knows what was true.

``world`` is virtual time and what stands between a server and the detector: disks, followers,
pauses of our own. ``server`` is one server of LMDeploy, or in a quarter of the histories of vLLM.
``fleet`` is who sends it work, and what befalls it. ``trial`` runs one history, with several
detectors listening at once.

Where the numbers come from
---------------------------

Read in upstream's code (LMDeploy 0.12.3 to 0.18.0, paths of that repository):

- a beat every 10 s plus the RPC plus lag, none in an interval without tokens, and none any more
  once the RPC is not answered: ``serve/openai/api_server.py`` (``_force_log``),
  ``metrics/loggers.py``;
- prompt tokens count with the first output token: ``metrics/stats.py`` (``update_from_output``);
- gauges are set by the task that prints beats, counters by the one that hands out tokens:
  ``metrics/metrics_processor.py``;
- the monitor behind ``/health`` polls every 12 s, waits 10 s for the engine's loop, and calls it
  unhealthy after 90 s without a forward while requests are handed out: ``serve/core/health.py``,
  ``serve/core/async_engine.py``; it says *sleeping* before the engine has drained;
- waking up blocks both loops, an update of the weights the engine's:
  ``serve/openai/endpoints/management.py``, ``pytorch/engine/mp_engine``;
- a block-buffered standard output up to 0.10.2: ``print`` without ``flush``;
- Ray's de-duplication makes one line of those that differ in digits only, and holds repetitions
  back for 5 s: ``ray/_private/ray_logging``;
- vLLM's API server prints by itself every 10 s, one line of zeros when tokens cease, and nothing
  after it: ``vllm/v1/metrics/loggers.py`` (``LoggingStatLogger.log``).

Measured on a real engine (H200, 0.18.0, tiny model): voluntary context switches a second of the
engine's loop (idle 96, awaiting 102, polling for a kernel 880, busy 10) and its CPU (3.7, 3.8, 6.7
and 97 to 100 percent), those of the API server's loop (13 idle, 178 busy), a GPU at rest (119 W of
700 W) and under a kernel that spins (utilisation 100, memory activity 0, 119 W).

Assumed, and drawn anew for each history: rates of arrival, lengths, rates of prefill and decoding
(a prompt of 262,144 tokens takes 4 s to 3 min), lengths of training steps (2 to 40 min), of weight
updates (3 to 60 s), wake-ups (0.3 to 20 s) and compilations of kernels (1 to 45 s), utilisation and
power of a busy GPU, how often disks are slow and clocks step, and that one prompt is read at a
time.
"""
