"""Errors in the words of commands: users of the command line know options and commands, not calls and arguments."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = (
    # The name of the call at the beginning of an argument error.
    (r"^[A-Za-z_.]+: (?=\w+ is )", ""),
    # Whole pieces of advice, before the single words in them.
    (r"call log\.slots\.reset\([^)]*\), or use 'strandline slots reset'", "use 'strandline slots reset'"),
    (r"'strandline sources list' and sl\.log\.sources show them", "'strandline sources list' shows them"),
    (r"let open\(\.\.\., create=True, retention=\.\.\.\) write", "let 'strandline create' write"),
    (r"create one with open\(\.\.\., create=True\)", "create one with 'strandline create'"),
    (r"open it with strandline\.compat\.WriteAheadLog\.open\(\.\.\., migrate=True\)", "use 'strandline wal migrate'"),
    (r"open it with strandline\.open\('(wal:[^']*)'\)", r"name it as \1"),
    (r"open it with strandline\.open\([^)]*queue-v1'\)", "look at it with 'strandline lag --format queue-v1'"),
    (r"open it with strandline\.open\b", "read it with 'strandline tail'"),
    (r"open it with strandline\.node\.[\w.]+, strandline\.node\.\w+ or '", "run it with '"),
    (r"open it with strandline\.(\w+)\.open", r"a program opens it, as its \1"),
    (r"import it into a store with import_from", "a program imports it into a store"),
    (r"follow into it with strandline\.DeltaSink", "follow into it with 'strandline follow'"),
    (r"with strandline\.compat\.WriteAheadLog\.open\('[^']*', migrate=True\) or '", "with '"),
    (r", with take_over='[^']*', or '", ", with '"),
    (r"\(take_over='([^']*)'\)", r"(--take-over \1)"),
    (r"pass skip_trimmed=True \(--skip-trimmed\)", "pass --skip-trimmed"),
    (r"call it as grpc\+tls://, or set insecure=True", "call it as grpc+tls://"),
    (r"give it a lease, or an upstream, or let it lead", "give it --lease, --upstream or --lead"),
    (r"give it tokens or client_roots", "give it --tokens or --client-ca"),
    (r"set insecure=True", "pass --insecure"),
    (r"follow from start='retained'", "follow it --from retained"),
    (
        r"The cursor is at (\d+) and the log begins at (\d+): bootstrap the consumer again",
        r"Offset \1 was trimmed, and the log begins at \2: begin there; a table that was at \1 has to be built again",
    ),
    (
        r"\(the log begins at (\d+)\): start there, or bootstrap",
        r"(the log begins at \1): begin there, --from retained",
    ),
    (r"', or valid_prefix=True in a program\)", "')"),
    (r"\('(--[a-z-]+)', [a-z_]+=True\)", r"(\1)"),
    (r"follow with repair=True", "use 'strandline table repair'"),
    (r"leave repair=True out", "it cannot be repaired"),
    (r"use evolve_value, or open it without value=", "leave the schema out, or create another log"),
    (r"open the node with cold= \(strandline node run --cold\)", "use 'strandline node run --cold'"),
    (r"if it is opened with cold=", "with 'strandline node run --cold'"),
    (r"\(cold=, and events= and partitions= of its TierSettings\)", "(--cold)"),
    (r"open it with dead_letters=True", "pass --dead-letters yes"),
    (r"name their table with dead_letters=", "name their table with --dead-letters"),
    (r"open it with create=True to make it", "create it first"),
    (r"add one, such as datetime\.now\(UTC\)", "add one, such as 2026-01-15T05:29:00Z"),
    (r"use a schema registry \(sl\.Avro\([^)]*\)\), or begin", "begin"),
    (r"soft_deletes='?(\w+)'?; open it so,", r"soft deletes (\1): follow it by a program, as it was made,"),
    (r"give the sink tombstones='key'", "pass --tombstones key"),
    (r"if it is a JSON object with it, a codec of the record's key, or", "if it is a JSON object with it, or"),
    # Options by the names of arguments.
    (r"\btombstones='([a-z-]+)'", r"--tombstones \1"),
    (r"\btombstones=", "--tombstones"),
    (r"\bmode='?(\w+)'?; open it with that mode", r"--mode \1: pass that"),
    (r"\bmode='?(\w+)'?", r"--mode \1"),
    (r"\(verify=False\)", "(--no-verify)"),
    (r"\bkey=\(?'?([^,:);]*?)'?,?\)?(?=[,:;. ])", r"--key \1"),
    (r"\((\w+)=\)", r"(--\1)"),
    # Calls that are commands.
    (r"\bsl\.ingest\b", "'strandline ingest'"),
    (r"\bsl\.tables\.rebuild\b", "'strandline table rebuild'"),
)
_COMPILED: Final = tuple((re.compile(pattern), words) for pattern, words in _WORDS)


def in_commands(sentence: str) -> str:
    """The sentence of an error, with commands and options for calls and arguments.

    >>> in_commands("Files go into object logs, and this is none: move that with sl.ingest.")
    "Files go into object logs, and this is none: move that with 'strandline ingest'."
    >>> in_commands("The name of a/b does not say its format: name it (format=).")
    'The name of a/b does not say its format: name it (--format).'
    """
    for pattern, words in _COMPILED:
        sentence = pattern.sub(words, sentence)
    return sentence
