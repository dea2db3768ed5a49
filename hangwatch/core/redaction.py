"""What must not leave the machine is taken out; what a reader compares stays comparable.

Theory of operation
-------------------

Four kinds of things are private, and each is treated in its own way:

1. *Secrets* (keys, tokens, passwords, credentials in URLs) are masked. They are found by the form
   that their issuers gave them, by the name in front of them (``api_key=``, ``--api-key``,
   ``Authorization:``) and inside base64.
2. *What users asked* (prompts, messages, token ids) is withheld from logs and from the names of
   tasks, with its size. A
   prompt that runs over its line takes the following lines with it until one looks like a log
   line again.
3. *Who and where* (host and pod names, addresses, users, e-mail addresses) becomes a stable name:
   an HMAC under a key that stays at home, so that ``host-3f9a2c`` is the same host throughout and
   in the next bundle too, and nobody can count through all addresses to find it. Without a key
   the names are numbered in order of appearance.
4. *The environment* is an allow-list of names: nothing else is kept, whatever it holds.

The number of lines never changes, so a citation of line 17 stays right. Redaction fails closed:
a file of a kind that we cannot read is withheld whole (``WithheldError``).

What it does not do: recognise a secret without form or name, a host name that was never said to
be one, or a private path; ``hangwatch review`` is for those.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, TypeAlias

from hangwatch.model.identity import InstanceKey

MASK: Final = "[redacted]"

ALLOWED_ENVIRONMENT: Final = re.compile(
    r"^(PATH|PWD|HOME|LANG|LC_\w+|TZ|SHLVL|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|"
    r"PYTHON(PATH|HOME|UNBUFFERED|FAULTHANDLER|ASYNCIODEBUG|MALLOC|HASHSEED|DEVMODE|VERSION)|"
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|HOME|PATH|VERSION|MODULE_LOADING|"
    r"LAUNCH_BLOCKING|ENABLE_USER_TRIGGERED_COREDUMP|ENABLE_COREDUMP_ON_EXCEPTION|"
    r"COREDUMP_\w+|CACHE_PATH|MPS_\w+)|"
    r"NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_\w+|DISABLE_REQUIRE)|NCCL_\w+|GLOO_\w+|"
    r"TORCH_\w+|PYTORCH_\w+|TORCHINDUCTOR_\w+|TRITON_\w+|OMP_\w+|MKL_\w+|OPENBLAS_NUM_THREADS|"
    r"LMDEPLOY_\w+|UVICORN_LOG_LEVEL|VLLM_\w+|SGLANG_\w+|SGL_\w+|DEEPEP_\w+|DLSLIME_\w+|"
    r"RAY_(?!REDIS)\w+|XTUNER_\w+|HANGWATCH_\w+|TOKENIZERS_PARALLELISM|HF_HUB_OFFLINE|"
    r"TRANSFORMERS_OFFLINE|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_PORT|"
    r"UCX_\w+|MALLOC_\w+)$"
)
"""Names of variables that may enter a bundle; their values are redacted like any text."""

_PRIVATE_NAME: Final = (
    r"(?:api[_-]?keys?|secret(?:[_-]?(?:access)?[_-]?key)?|token|passw(?:or)?d|passphrase|pwd|"
    r"credentials?|private[_-]?key|access[_-]?key(?:[_-]?id)?|account[_-]?key|shared[_-]?key|"
    r"auth[_-]?key|cookie|authorization|signature|webhook(?:[_-]?url)?|dsn)"
)

_PRIVATE_KEY_NAME: Final = re.compile(rf"(?i)(?:{_PRIVATE_NAME}|[a-z0-9]_key)$")
_PRIVATE_FLAG: Final = re.compile(rf"(?i)^--?[a-z0-9_.-]*{_PRIVATE_NAME}$")

# Forms that issuers gave their keys; a prefix is enough, since nothing else begins with them.
_KEY_FORMS: Final = re.compile(
    r"""(?x)
      (?<![A-Za-z0-9])(?:
        (?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}            # Amazon
      | hf_[A-Za-z0-9]{20,}                            # Hugging Face
      | sk-[A-Za-z0-9_-]{16,}                          # OpenAI, Anthropic and their look-alikes
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}
      | glpat-[\w-]{16,}
      | xox[abeoprs]-[\w-]{10,} | xapp-[\w-]{10,}      # Slack
      | AIza[\w-]{30,} | ya29\.[\w-]{20,} | GOCSPX-[\w-]{20,}
      | nvapi-[\w-]{16,} | gsk_[A-Za-z0-9]{20,} | xai-[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{20,}
      | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{16,} | dckr_pat_[\w-]{16,}
      | SG\.[\w-]{16,}\.[\w-]{16,}                     # SendGrid
      | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}           # Stripe
      | LTAI[A-Za-z0-9]{12,30}                         # Aliyun
      | AKID[A-Za-z0-9]{28,40}                         # Tencent
      | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*             # JSON web token
      )
    """,
    re.ASCII,
)
_PEM: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.{0,20000}?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEARER: Final = re.compile(
    r"(?i)\b(bearer|basic|digest|negotiate|aws4-hmac-sha256)(\s+)(?=[\w+/=.~:-]{6})"
    r"(?!auth|realm)[\w+/=.~:-]+",
    re.ASCII,
)
_URL_CREDENTIALS: Final = re.compile(r"(://)[^/\s@\"'<>]{1,256}@")
_URL_QUERY: Final = re.compile(
    r"(?i)([?&](?:sig|signature|token|key|api[_-]?key|access[_-]?token|code|password|secret|"
    r"auth|credential|x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|ossaccesskeyid)=)[^&\s\"'#<>]+"
)
_HOOKS: Final = re.compile(
    r"(?i)((?:hooks\.slack\.com/\w+|discord(?:app)?\.com/api/webhooks|"
    r"oapi\.dingtalk\.com/robot|open\.feishu\.cn/open-apis/bot|qyapi\.weixin\.qq\.com/cgi-bin)/)"
    r"[^\s\"'<>]+"
)
_FLAG: Final = re.compile(
    rf"(?i)(--[a-z0-9_.-]{{0,40}}?{_PRIVATE_NAME})"
    r"((?:=|[ \t]+|\x00|\"\s*,\s*\"|'\s*,\s*')(?!-)[^\s\"'\x00]+)"
    r"((?:(?:[ \t]+|\x00|\"\s*,\s*\"|'\s*,\s*')(?!-)[^\s\"'\x00]+)*)"
)
_FLAG_VALUE: Final = re.compile(r"(=|[ \t]+|\x00|[\"']\s*,\s*[\"'])[^\s\"'\x00]+")
_NAMED: Final = re.compile(
    rf"(?i)({_PRIVATE_NAME}|(?<=[a-z0-9])_key)(\\?[\"']?\s{{0,4}}(?:=>|[=:])\s{{0,4}})"
    r"(b?\\?\"(?:[^\"\\\n]|\\.){1,4096}\\?\"|b?'(?:[^'\\\n]|\\.){1,4096}'|"
    r"\[[^\]\n]{1,4096}\]|[^\s,;&'\"(){}\[\]<>|\\]+)"
)
_HARMLESS: Final = re.compile(r"(?i)^[\"']?(none|null|true|false|\d{1,8}|\d+\.\d+|\**|)[\"']?$")
_BASE64: Final = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,}={0,2}")
_BASE64_LIMIT: Final = 512

_PROMPT_QUOTED: Final = re.compile(
    r"(?i)(\b(?:prompt|text|input_text|content|messages|completion|generated_text|query|question|"
    r"answer|history|instruction|conversation|reasoning_content|image_url|response_text|"
    r"input_str|output_str)\\?[\"']?\s{0,2}[=:]\s{0,2})(?=\\?[\"'\[{])"
)
_PROMPT_BARE: Final = re.compile(r"(?i)(\b(?:prompt|chat history|received text)\s{0,2}[=:]\s{0,2})")
_PROMPT_END: Final = re.compile(
    r", (?:prompt_token_ids?|prompt_tokens?|params|input_ids|adapter_name|lora_request)\s*[=:]"
)
_TOKEN_IDS: Final = re.compile(
    r"(?i)(\b\w{0,24}(?:token_ids?|input_ids|output_ids|tokens|ids)\\?[\"']?\s{0,2}[=:]\s{0,2})"
    r"(?:array\(|tensor\()?\[[\d\s,.\[\]-]{0,200000}(?:\]|$)"
)
_NUMBERS: Final = re.compile(r"\[\s*(?:\d+\s*,\s*){15,}(?:\d+\s*)?(?:\]|$)")
_LOG_LINE: Final = re.compile(
    r"^(?:\x1b\[[0-9;]*m)?(?:\(|\[?\d{4}[-/]\d\d[-/]\d\d|\[?\d\d:\d\d:\d\d|[IWEF]\d{4} |:\w+:|"
    r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|TRACE|HINT)\b|Traceback |  File \"|"
    r"\w+(?:\.\w+)*(?:Error|Exception)\b|\x00)"
)

_EMAIL: Final = re.compile(
    r"(?<![\w.+-])(?!git@)[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,5}", re.ASCII
)
_HOME: Final = re.compile(r"((?:^|[^\w.-])/(?:home|Users)/)([^/\s:\"'\x00,;)\]]{1,64})")
_IPV4: Final = re.compile(
    r"(?<![\w.])(?<!==)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)"
    r"(?![\w]|\.\d|\.dist-info|\.so)",
    re.ASCII,
)
_VERSION_BEFORE: Final = re.compile(
    r"(?i)(?:version|nvidia-[\w-]+|cu\d\d|driver)[\"']?\s*[:=]\s*[\"']?$"
)
_IPV4_DASHED: Final = re.compile(r"\bip(?:-\d{1,3}){4}\b(?:\.[a-z0-9.-]+)?")
_IPV6: Final = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
_MAC: Final = re.compile(r"(?<![\w:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5,31}(?![\w:])")
# A part of hardware is known by its number wherever it goes.
_GPU: Final = re.compile(
    r"(?i)(?<![\w-])(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![\w-])"
)
_SERIAL: Final = re.compile(
    r"(?i)(\b(?:serial number|gpu pdi|gpu fabric guid|cluster ?uuid)\s*:\s*)(?!N/A)([\w.-]{4,64})"
)
_URL_HOST: Final = re.compile(r"(://(?:\[redacted\]@)?)([A-Za-z0-9][A-Za-z0-9.-]{0,253})")
_INTERNAL: Final = re.compile(
    r"(?<![\w.@/-])[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,6}"
    r"\.(?:local|internal|intranet|corp|lan|cluster|svc|home\.arpa)(?![\w-])",
    re.ASCII,
)
# The alphabet that Kubernetes draws the ends of pod names from.
_POD: Final = re.compile(
    r"(?<![\w.-])[a-z][a-z0-9-]{0,60}-(?=[0-9]*[bcdfghjklmnpqrstvwxz])"
    r"[bcdfghjklmnpqrstvwxz2456789]{8,10}-[bcdfghjklmnpqrstvwxz2456789]{5}(?![\w-])"
)


_Hints: TypeAlias = tuple[tuple[str, re.Pattern[str]], ...]
_LITERAL: Final = re.compile(r"[a-z0-9_/@:-]+")


def _hints(*patterns: str) -> _Hints:
    """Compile patterns, each beside the literal that it begins with.

    ``in`` finds a literal several times faster than ``re`` does, and most are not there at all.
    """
    return tuple(
        (match[0] if (match := _LITERAL.match(pattern)) else "", re.compile(pattern))
        for pattern in patterns
    )


# Only lines with a hint (in lower case) are given to the slow pattern of the same name.
_NAMED_HINTS: Final = _hints(
    r"api[_-]?key",
    "secret",
    r"token(?!s[^\w\"'=:]|s/)",
    "passw",
    "passphrase",
    "pwd",
    "credential",
    "private[_-]?key",
    "access[_-]?key",
    "account[_-]?key",
    "shared[_-]?key",
    "auth[_-]?key",
    "authorization",
    "cookie",
    "signature",
    "webhook",
    "dsn",
    "_key",
)
_BEARER_HINTS: Final = _hints("bearer", "basic", "digest", "negotiate", "aws4-")
_PROMPT_HINTS: Final = _hints(
    r"prompt(?!\sthr)",
    "text",
    "content",
    "messages",
    "completion",
    "query",
    "question",
    "answer",
    "history",
    "instruction",
    "conversation",
    "image_url",
    r"put_(?:str|ids)",
    "token_id",
    r"tokens[\\\"'\s=:]",
    r"ids[\\\"'\s=:]",
    r"\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*,",
)
_URL_HINTS: Final = _hints("://")
_EMAIL_HINTS: Final = _hints("@")
_HOME_HINTS: Final = _hints("/home/", "/users/")
_IPV4_HINTS: Final = _hints(r"\.\d{1,3}\.\d{1,3}\.\d")
_IPV4_DASHED_HINTS: Final = _hints(r"ip-\d")
_COLONS_HINTS: Final = _hints("::", ":[0-9a-f]{1,4}:[0-9a-f]{1,4}:[0-9a-f]{1,4}:")
_GPU_HINTS: Final = _hints(r"gpu-[0-9a-f]{8}-", r"mig-[0-9a-f]{8}-")
_SERIAL_HINTS: Final = _hints("serial number", "gpu pdi", "gpu fabric guid", r"cluster ?uuid")
_INTERNAL_HINTS: Final = _hints(r"\.(?:local|internal|intranet|corp|lan|cluster|svc|home\.arpa)")
_POD_HINTS: Final = _hints("-[bcdfghjklmnpqrstvwxz2456789]{8,10}-[bcdfghjklmnpqrstvwxz2456789]{5}")

_LEARN_HINTS: Final = _hints("host", "node", "pod", "namespace", r"linux [a-z0-9]", "nfs: server")
_LEARN: Final = (
    re.compile(
        r"(?i)(?:\bhost_?name|\bnode_?name|\bpod_?name)"
        r"\\?[\"']?\s{0,4}[=:]\s{0,4}\\?[\"']?([a-z0-9][a-z0-9.-]{2,252})(?![\w(])"
    ),
    # Weaker names need a value that looks like one of a machine.
    re.compile(
        r"(?i)(?:\bhost|\bpod|\bnode|\bnamespace)\\?[\"']?\s{0,4}[=:]\s{0,4}\\?[\"']?"
        r"((?=[a-z.]{0,60}[0-9-])[a-z0-9][a-z0-9.-]{2,252})(?![\w(])"
    ),
    re.compile(r"(?m)^Linux ([A-Za-z0-9][\w.-]{2,252}) \d+\.\d+"),
    # The kernel log: fs/nfs, net/sunrpc/clnt.c; systemd at the start of a machine.
    re.compile(r"\bnfs: server ([A-Za-z0-9][\w.-]{2,252}) (?:not responding|OK)"),
    re.compile(r"\bHostname set to <([A-Za-z0-9][\w.-]{2,252})>"),
)

_PUBLIC_DOMAINS: Final = re.compile(
    r"(?i)^(?:localhost|(?:[\w-]+\.)*(?:github\.com|github\.io|gitlab\.com|githubusercontent\.com|"
    r"huggingface\.co|hf\.co|modelscope\.cn|pypi\.org|pythonhosted\.org|python\.org|pytorch\.org|"
    r"nvidia\.com|ray\.io|readthedocs\.io|openxlab\.org\.cn|internlm\.org))$"
)
# A machine may bear the name of a thing; the reports need these words, and they betray nobody.
_COMMON_WORDS: Final = frozenset(
    re.findall(
        r"\S+",
        """localhost local none null true false default main head node worker driver server client
        engine host hosts pod container python python3 lmdeploy vllm sglang xtuner ray raylet
        hangwatch gpu cpu cuda process unknown test linux debian ubuntu docker sandbox router proxy
        store session kube-system health metrics system root user data memory cache tokens
        running waiting routed completed succeeded failed finished unfinished requests reqs""",
    )
)

_TASKS_FILE: Final = re.compile(r"(?:ray_)?tasks\d?\.json")
# Names of tasks stand in these places of ``hangwatch.tasks/1``, in problems behind "task '"; Ray's
# tasks have a name, too.
_TASK_NAME: Final = re.compile(rb'("(?:name|task|from|to|where)":\s*)("(?:[^"\\]|\\.)*")')

TEXT_SUFFIXES: Final = frozenset(
    (".json", ".jsonl", ".txt", ".csv", ".prom", ".md", ".log", ".out", ".err", ".tsv", ".html")
)


class WithheldError(Exception):
    """A file cannot be redacted and must not be kept."""


class Redactor:
    """Redacts the files of one incident; counts what it took out, by kind.

    Attributes:
        counts: How many things of each kind were taken out: ``secret``, ``prompt``, ``host``,
            ``address``, ``email``, ``user``, ``gpu``, ``serial``, ``environment``.
    """

    def __init__(
        self,
        key: bytes | None = None,
        *,
        hosts: Iterable[str] = (),
        secrets: Iterable[str] = (),
    ) -> None:
        """Make a redactor.

        Args:
            key: Of the pseudonyms; ``None`` numbers them instead, for output that stays here.
            hosts: Names of machines and pods known from elsewhere.
            secrets: Secrets known from elsewhere, whatever form they have.
        """
        self.counts: Counter[str] = Counter()
        self._key = key
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()
        self._strings: dict[str, str] = {}
        self._plain_names: set[bytes] = set()
        self._hosts: set[str] = set()
        self._hosts_pattern: re.Pattern[str] | None = None
        self._known = _literally(secrets)
        for host in hosts:
            self._learn_host(host)

    def learn(self, data: bytes) -> None:
        """Note the host names that *data* says are host names; call it for every file first."""

        def learn(line: str) -> str:
            for pattern in _LEARN:
                for match in pattern.finditer(line):
                    self._learn_host(match[1])
            return line

        _on_lines(data.decode("latin-1"), _LEARN_HINTS, learn)

    def file(self, path: str, data: bytes) -> bytes:
        """Return the redacted content of one file.

        Raises:
            WithheldError: It is of a kind that cannot be redacted.
        """
        pure = PurePosixPath(path)
        if pure.suffix not in TEXT_SUFFIXES and not _log_name(pure.name):
            raise WithheldError(f"{pure.name}: its name says no kind of file that can be redacted")
        if pure.name.startswith("environ") and pure.suffix == ".json":
            return self._environment_file(data)
        if _TASKS_FILE.fullmatch(pure.name):
            return self._json(self._task_names(data))
        if pure.suffix == ".json":
            return self._json(data)
        return self.text(data, log=_log_name(pure.name))

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that may be kept, their values redacted."""
        kept = {}
        for name, value in variables.items():
            if ALLOWED_ENVIRONMENT.match(name) and not _PRIVATE_KEY_NAME.search(name):
                kept[name] = self.string(value)
            else:
                self.counts["environment"] += 1
        return kept

    def string(self, text: str) -> str:
        """Return a redacted string."""
        return self.text(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")

    def value(self, value: Any) -> Any:
        """Return a frozen value, or plain data, with every string in it redacted."""
        if isinstance(value, InstanceKey):
            return replace(value, host=self.address(value.host))
        if type(value) is str:
            if value not in self._strings:
                self._strings[value] = self.string(value)
            return self._strings[value]
        if isinstance(value, tuple | list):
            return type(value)(self.value(item) for item in value)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            changed = {}
            for item in fields(value):
                before = getattr(value, item.name)
                after = self.value(before)
                if after is not before and after != before:
                    changed[item.name] = after
            return replace(value, **changed) if changed else value
        return value

    def address(self, host: str) -> str:
        """Return the pseudonym of an address or host name; ``""`` and loopback stay."""
        if not host or host.lower() in _COMMON_WORDS:
            return host
        try:
            kept = _nobodys(ipaddress.ip_address(host))
        except ValueError:
            return self._pseudonym("host", host)
        return host if kept else self._pseudonym("address", host)

    def text(self, data: bytes, *, log: bool = False) -> bytes:
        """Return *data* with as many lines and without what is private.

        Args:
            data: Text in any encoding that extends ASCII; other bytes pass through.
            log: Whether to look for prompts and token ids too.
        """
        text = data.decode("latin-1")
        text = self._secrets(text)
        if log:
            text = self._prompts(text)
        text = self._identities(text)
        return text.encode("latin-1", "replace")

    # ------------------------------------------------------------------ secrets

    def _secrets(self, text: str) -> str:
        if "PRIVATE KEY" in text:
            text = self._mask(_PEM, text)
        if self._known is not None:
            text = self._mask(self._known, text)
        text = self._mask(_KEY_FORMS, text)
        text = _on_lines(text, _BEARER_HINTS, lambda line: self._mask(_BEARER, line, keep=2))
        text = self._mask(_FLAG, text, replace=_mask_flag)
        text = _on_lines(text, _URL_HINTS, self._url_secrets)
        text = _on_lines(
            text, _NAMED_HINTS, lambda line: self._mask(_NAMED, line, replace=_mask_named)
        )
        return _BASE64.sub(self._base64, text)

    def _url_secrets(self, line: str) -> str:
        line = self._mask(_URL_CREDENTIALS, line, replace=lambda m: f"{m[1]}{MASK}@")
        line = self._mask(_URL_QUERY, line, keep=1)
        return self._mask(_HOOKS, line, keep=1)

    def _mask(
        self,
        pattern: re.Pattern[str],
        text: str,
        *,
        keep: int = 0,
        replace: Callable[[re.Match[str]], str] | None = None,
    ) -> str:
        def substitute(match: re.Match[str]) -> str:
            if replace is not None:
                after = replace(match)
            else:
                kept = "".join(match[i] for i in range(1, keep + 1))
                after = kept + MASK + "\n" * match[0][len(kept) :].count("\n")
            if after != match[0]:
                self.counts["secret"] += 1
            return after

        return pattern.sub(substitute, text)

    def _base64(self, match: re.Match[str]) -> str:
        token = match[0]
        if len(token) > _BASE64_LIMIT and not token.isdigit():
            self.counts["prompt"] += 1
            return f"[{len(token)} characters withheld]"
        if token.islower():  # a path; base64 of text has capitals
            return token
        padded = token.replace("-", "+").replace("_", "/").rstrip("=")
        try:
            inside = base64.b64decode(padded + "=" * (-len(padded) % 4)).decode("latin-1")
        except (ValueError, binascii.Error):
            return token
        known = self._known is not None and self._known.search(inside)
        if known or _KEY_FORMS.search(inside) or "PRIVATE KEY" in inside or _names_secret(inside):
            self.counts["secret"] += 1
            return MASK
        return token

    # ------------------------------------------------------------------ prompts

    def _prompts(self, text: str) -> str:
        """Withhold what users asked, and the lines that a prompt runs over."""
        pieces, position = [], 0
        for hit in _hits(text, _PROMPT_HINTS):
            if hit < position:
                continue
            start, end = _line_around(text, hit)
            line, running_over = self._prompt_line(text[start:end])
            pieces += [text[position:start], line]
            position = end
            while running_over and position < len(text):
                _, end = _line_around(text, position + 1)
                line = text[position + 1 : end]
                if _LOG_LINE.match(line):
                    break
                if line:
                    self.counts["prompt"] += 1
                    line = f"[{len(line)} characters withheld]"
                pieces += ["\n", line]
                position = end
        return "".join(pieces) + text[position:]

    def _prompt_line(self, line: str) -> tuple[str, bool]:
        """Return the line without what users asked, and whether that runs over its end."""
        running_over = False
        pieces, position = [], 0
        for start, opened in _prompts_in(line):
            if start < position:
                continue
            end, closed = _end_of_value(line, start) if opened else _end_of_bare(line, start)
            running_over |= not closed
            if end - start > 2:
                self.counts["prompt"] += 1
                pieces += [line[position:start], f"[{end - start} characters withheld]"]
                position = end
        line = "".join(pieces) + line[position:]
        line, ids = _TOKEN_IDS.subn(_count_numbers, line)
        line, lists = _NUMBERS.subn(_count_bare_numbers, line)
        self.counts["prompt"] += ids + lists
        return line, running_over

    # ------------------------------------------------------------------ who and where

    def _identities(self, text: str) -> str:
        text = _on_lines(text, _EMAIL_HINTS, self._renaming(_EMAIL, "email"))
        text = _on_lines(text, _HOME_HINTS, self._renaming(_HOME, "user"))
        text = _on_lines(
            text, _URL_HINTS, lambda t: _URL_HOST.sub(lambda m: m[1] + self._url_host(m[2]), t)
        )
        text = _on_lines(text, _IPV4_DASHED_HINTS, self._renaming(_IPV4_DASHED, "host"))
        text = _on_lines(text, _IPV4_HINTS, lambda line: _IPV4.sub(self._ip, line))
        text = _on_lines(text, _COLONS_HINTS, self._colons)
        text = _on_lines(text, _GPU_HINTS, self._renaming(_GPU, "gpu"))
        text = _on_lines(text, _SERIAL_HINTS, self._renaming(_SERIAL, "serial"))
        text = _on_lines(text, _INTERNAL_HINTS, self._renaming(_INTERNAL, "host"))
        text = _on_lines(text, _POD_HINTS, self._renaming(_POD, "host"))
        if self._hosts:
            if self._hosts_pattern is None:
                names = sorted(map(re.escape, self._hosts), key=len, reverse=True)
                self._hosts_pattern = re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(names)})(?![\w-])")
            text = self._renaming(self._hosts_pattern, "host")(text)
        return text

    def _renaming(self, pattern: re.Pattern[str], kind: str) -> Callable[[str], str]:
        """Return what replaces the last group of *pattern*, or all of it, by a pseudonym."""

        def rename(match: re.Match[str]) -> str:
            name = match[pattern.groups]
            return match[0][: len(match[0]) - len(name)] + self._pseudonym(kind, name.lower())

        return lambda text: pattern.sub(rename, text)

    def _colons(self, line: str) -> str:
        line = self._renaming(_MAC, "mac")(line)
        return _IPV6.sub(self._ip, line)

    def _ip(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        before = match.string[max(0, match.start() - 40) : match.start()]
        code = address.version == 6 and not re.search(r"\d", match[0])  # ``a::b`` is C++
        if code or _nobodys(address) or _VERSION_BEFORE.search(before):
            return match[0]
        return self._pseudonym("address", match[0].lower())

    def _url_host(self, host: str) -> str:
        if _PUBLIC_DOMAINS.match(host) or _IPV4.fullmatch(host):
            return host
        if host.lower() in _COMMON_WORDS:
            return host
        return self._pseudonym("host", host.lower())

    def _learn_host(self, name: str) -> None:
        name = name.strip(".").lower()
        plain = len(name) < 4 or name in _COMMON_WORDS or name.replace(".", "").isdigit()
        if plain or _is_pseudonym(name) or _PUBLIC_DOMAINS.match(name):
            return
        self._hosts.add(name)
        self._hosts_pattern = None
        self._plain_names.clear()

    def _pseudonym(self, kind: str, name: str) -> str:
        if _is_pseudonym(name):
            return name
        known = self._names.get((kind, name))
        if known is None:
            if self._key is None:
                self._numbers[kind] += 1
                known = f"{kind}-{self._numbers[kind]}"
            else:
                digest = hmac.new(self._key, f"{kind}:{name}".encode(), hashlib.sha256).hexdigest()
                known = f"{kind}-{digest[:8]}"
            self._names[kind, name] = known
        self.counts[kind] += 1
        return known

    # ------------------------------------------------------------------ structured files

    def _json(self, data: bytes) -> bytes:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return self.text(data)  # cut short, or several documents behind each other
        redacted = self.text(data)
        if b"\\" not in data:
            return redacted if _is_json(redacted) else self._rewritten(value)
        try:
            # Escapes can hide a secret from a pattern: look at what a reader will see.
            strings = "\n".join(_strings(json.loads(redacted)))
            seen = strings.encode("utf-8", "replace")
            if seen == self.text(seen):
                return redacted
        except (ValueError, RecursionError):
            pass
        return self._rewritten(value)

    def _rewritten(self, value: Any) -> bytes:
        try:
            return (json.dumps(self._walk(value), indent=1) + "\n").encode("ascii")
        except RecursionError as error:
            raise WithheldError("the file is nested too deeply to be redacted") from error

    def _walk(self, value: Any) -> Any:
        """Redact every string of a JSON value by itself."""
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, dict):
            return {
                self.string(key): MASK
                if _PRIVATE_KEY_NAME.search(key) and isinstance(item, str | list) and item
                else self._walk(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            private = [
                i > 0 and isinstance(value[i - 1], str) and bool(_PRIVATE_FLAG.match(value[i - 1]))
                for i in range(len(value))
            ]
            return [
                MASK if hide and isinstance(item, str) else self._walk(item)
                for item, hide in zip(value, private, strict=True)
            ]
        return value

    def _environment_file(self, data: bytes) -> bytes:
        try:
            variables = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WithheldError("the environment is not JSON") from error
        if not isinstance(variables, dict):
            raise WithheldError("the environment is not a JSON object")
        kept = self.environment({str(k): str(v) for k, v in variables.items()})
        return (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode()

    def _task_names(self, data: bytes) -> bytes:
        """Withhold what users asked from names of tasks: a program may name them by anything."""

        def rename(match: re.Match[bytes]) -> bytes:
            if match[2] in self._plain_names:
                return match[0]
            try:
                name = str(json.loads(match[2]))
            except ValueError:
                return match[0]
            kept = self.text(name.encode("utf-8", "surrogateescape"), log=True)
            shown = kept.decode("utf-8", "replace")
            if shown == name:
                self._plain_names.add(match[2])
                return match[0]
            return match[1] + json.dumps(shown).encode("ascii")

        return _TASK_NAME.sub(rename, data)


def _literally(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds these secrets; a short one only as a word, lest it blot out half a text."""
    forms = sorted({form for s in secrets if s for form in (s, json.dumps(s)[1:-1])}, key=len)
    if not forms:
        return None
    return re.compile(
        "|".join(
            re.escape(form) if len(form) >= 8 else rf"(?<![\w-]){re.escape(form)}(?![\w-])"
            for form in reversed(forms)
        )
    )


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []


def _log_name(name: str) -> bool:
    """Say whether a file of this name holds lines of a program; rotated ones too."""
    stem = re.sub(r"\.\d{1,4}$", "", name)
    return stem.endswith((".log", ".out", ".err")) or stem in ("log.txt", "kmsg.txt")


def _nobodys(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_unspecified or address.is_multicast


def _is_pseudonym(name: str) -> bool:
    return re.fullmatch(r"(host|address|mac|user|email|gpu|serial)-[0-9a-f]+", name) is not None


def _names_secret(text: str) -> bool:
    match = _NAMED.search(text)
    return match is not None and not _HARMLESS.match(match[3])


def _mask_flag(match: re.Match[str]) -> str:
    value = _FLAG_VALUE.sub(lambda m: m[1] + MASK, match[2])
    further = match[3]
    if re.search(r"(?i)keys$", match[1]):
        further = _FLAG_VALUE.sub(lambda m: m[1] + MASK, further)
    return match[1] + value + further


def _mask_named(match: re.Match[str]) -> str:
    value = match[3]
    if _HARMLESS.match(value) or MASK in value:
        return match[0]
    quote = re.match(r"b?\\?[\"']", value)
    if quote is None:
        return match[1] + match[2] + MASK
    closing = quote[0].lstrip("b")
    return match[1] + match[2] + quote[0] + MASK + closing


def _on_lines(text: str, hints: _Hints, change: Callable[[str], str]) -> str:
    """Return *text* with *change* made to the lines that have a hint."""
    pieces, position = [], 0
    for hit in _hits(text, hints):
        if hit >= position:
            start, end = _line_around(text, hit)
            pieces += [text[position:start], change(text[start:end])]
            position = end
    return "".join(pieces) + text[position:] if pieces else text


def _hits(text: str, hints: _Hints) -> list[int]:
    # Latin-1 keeps its length in lower case.
    lowered = text.lower()
    return sorted(
        match.start()
        for literal, pattern in hints
        if literal in lowered
        for match in pattern.finditer(lowered)
    )


def _line_around(text: str, position: int) -> tuple[int, int]:
    end = text.find("\n", position)
    return text.rfind("\n", 0, position) + 1, len(text) if end < 0 else end


def _prompts_in(line: str) -> list[tuple[int, bool]]:
    """Return where values of prompts begin, and whether a quote or bracket opens them."""
    quoted = [(match.end(), True) for match in _PROMPT_QUOTED.finditer(line)]
    # The first one without a quote takes all that follows.
    bare = next((match.end() for match in _PROMPT_BARE.finditer(line)), None)
    if bare is not None and not any(start == bare for start, _ in quoted):
        quoted.append((bare, False))
    return sorted(quoted)


def _end_of_value(line: str, start: int) -> tuple[int, bool]:
    """Return where the value that begins at *start* ends, and whether it ends on this line."""
    opening = line[start : start + 1]
    if opening == "\\":
        opening = line[start : start + 2]
    if opening[-1:] in ("'", '"') and opening:
        position = start + len(opening)
        while (position := line.find(opening, position)) >= 0:
            if len(opening) == 2 or line[position - 1] != "\\":
                return position + len(opening), True
            position += 1
        return len(line), False
    if opening and opening in "[{":
        return _end_of_brackets(line, start)
    return start, True


def _end_of_bare(line: str, start: int) -> tuple[int, bool]:
    following = _PROMPT_END.search(line, start)
    return (following.start(), True) if following is not None else (len(line), False)


def _end_of_brackets(line: str, start: int) -> tuple[int, bool]:
    depth, quote, escaped = 0, "", False
    for i in range(start, len(line)):
        char = line[i]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
            if depth == 0:
                return i + 1, True
    return len(line), False


def _count_numbers(match: re.Match[str]) -> str:
    return f"{match[1]}[{len(re.findall(r'[0-9]+', match[0][len(match[1]) :]))} numbers withheld]"


def _count_bare_numbers(match: re.Match[str]) -> str:
    return f"[{match[0].count(',') + 1} numbers withheld]"
