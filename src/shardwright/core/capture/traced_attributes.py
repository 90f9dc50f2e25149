"""The plain attributes, global variables and other state that `forward` reads or changes while it
is traced.

A captured program depends on the values that `forward` reads. A value that `forward` changes would
change once, at capture, and not in each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.argument_containers import ArgumentContainers
from shardwright.core.capture.attributes import MISSING, PLAIN_TYPES, content, variables_at
from shardwright.core.capture.filled_modules import RegisteredTensors
from shardwright.core.capture.filled_state import (
    are_equal_tensors,
    has_unknown_values,
    only_adds_entries,
    replaced_none,
    tensors_inside,
    value_text,
)
from shardwright.core.capture.global_variables import GLOBALS, globals_of, globals_read, modes_read
from shardwright.core.capture.hooks import count_hooks
from shardwright.core.capture.known_values import KnownValues
from shardwright.core.capture.naming import LocatedError, current_line, located
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.process_state import ProcessState, change_message
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.state_changes import Change, StateLocation
from shardwright.core.capture.state_contents import OF_TORCH
from shardwright.errors import CaptureError

_REMEDY = (
    "register it as a buffer (`register_buffer`) and update the buffer in place (`copy_`), or "
    "change it in the training loop. If it is a cache that depends on shapes alone, such as a mask,"
    " call the model with the longest input before `plan`"
)
_REMEDY_OF_ITERATORS = (
    "store a number in place of the iterator: `self.step += 1` for a count, and"
    " `items[self.step % len(items)]` for a cycle"
)


class _SecondTraceEndedError(Exception):
    """Raised to end a second trace that could read a tensor which the first trace computed."""


class TracedAttributes:
    """Accesses of `forward` to plain attributes and other reachable state during tracing.

    Args:
        module: the module that is traced.

    Attributes:
        reads: (path, name) of attributes and global variables that `forward` reads before setting.
        writes: (path, name) of other attributes that `forward` sets.
        filled: fingerprint of each value that `forward` stores in a missing or None attribute or in
            a new cache entry, by its location.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._by_path = dict(module.named_modules())
        self._at_begin: dict[str, dict[str, Any]] = {}
        self._arguments = ArgumentContainers((), {})
        self._hooks: dict[str, int] = {}
        self._process = ProcessState()
        self._lines: dict[tuple[str, str], str] = {}
        self._filled: list[Change] = []
        self._read_as_dict: dict[str, None] = {}
        self._is_second = False
        self.writes: dict[tuple[str, str], None] = {}
        self.filled: dict[str, str] = {}
        self._record_state()
        self.reads: dict[tuple[str, str], None] = dict.fromkeys(globals_read(module))
        # After `_record_state`, which collects the code objects.
        self.reads |= dict.fromkeys(modes_read(self._reachable.codes))
        self._record_globals()

    def _record_state(self) -> None:
        self._reachable = self._at_first = ReachableState(self._module)
        self._before = {
            path: _fingerprint_attributes(child) for path, child in self._by_path.items()
        }

    def _record_globals(self) -> None:
        for path, name in self.reads:
            self._before.setdefault(path, {})[name] = content(globals_of(path)[name])

    @contextmanager
    def following_copy(self, original: nn.Module) -> Iterator[None]:
        """Return a context in which outside references to modules of the original model, such as
        in closures, refer to the traced copy."""
        references = OuterReferences(original, self._module, self._reachable, follow_ids=True)
        with references.leading_to_copy() as any_found:
            # The fingerprints of containers with redirected references are outdated.
            if any_found:
                self._record_state()
                self._record_globals()
            yield

    @contextmanager
    def recording(self, known_values: KnownValues) -> Iterator[None]:
        """Return a context that records attribute accesses of all modules.

        Args:
            known_values: computes the values of traced tensors that depend neither on inputs nor on
                parameters.

        Raises:
            CaptureError: if `forward` changes an attribute that the next call reads, or other state
                that a captured model would not change.
        """
        set_attribute = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            path = self._paths.get(id(module))
            # Code that reads `__dict__`, as `vars(self)` does, may depend on every attribute.
            if path is not None and name == "__dict__" and _is_user_code(sys._getframe(1)):
                self._read_as_dict[path] = None
                # An entry that no attribute has: new attributes count as well.
                self.reads[path, name] = None
                names = vars(module).keys() - OF_TORCH
                # Sorted: the order of a set differs between processes, and `Graph.attributes` keeps
                # this order.
                unset = ((path, each) for each in sorted(names) if (path, each) not in self.writes)
                self.reads.update(dict.fromkeys(unset))
            if path is not None and name not in OF_TORCH and (path, name) not in self.writes:
                variables = object.__getattribute__(module, "__dict__")
                # A missing attribute counts as read: `hasattr`, or `getattr` with a default,
                # depends on it.
                if name in variables or not (
                    name.startswith("__") or self._is_module_member(module, name)
                ):
                    self.reads[path, name] = None
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            path = self._paths.get(id(module))
            set_attribute(module, name, value)
            if path is not None and name in vars(module) and name not in OF_TORCH:
                # An attribute that the read `__dict__` did not contain: its absence was read.
                if path in self._read_as_dict and (path, name) not in self.writes:
                    self.reads[path, name] = None
                if (path, name) not in self.reads:
                    self.writes[path, name] = None
                # Only noted here, as `forward` may restore the value; `_check_variables` decides.
                elif content(value) != self._before[path].get(name):
                    self._lines.setdefault((path, name), current_line())

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        registered = RegisteredTensors(self._by_path, self._iterate_forward_codes)
        root = self._by_path[""]

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._at_begin = {path: dict(vars(child)) for path, child in self._by_path.items()}
            self._arguments = ArgumentContainers(args, kwargs)
            self._hooks = self._count_hooks()
            registered.begin()
            self._process = ProcessState()

        # Checked in hooks, right after `forward`: once the trace ends, `torch.export` has undone
        # in-place changes.
        handles = (
            # First of all pre-hooks, as the user's own may change attributes and arguments too.
            root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            root.register_forward_hook(lambda _, args, result: registered.update(result)),
            root.register_forward_hook(lambda *_: self._check_variables(known_values)),
            root.register_forward_hook(lambda *_: self._check_arguments_and_hooks()),
            root.register_forward_hook(lambda *_: self._check_reachable_state(known_values)),
            root.register_forward_hook(lambda *_: self._check_process_settings()),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # Deleted rather than restored: `nn.Module` inherits this method from `object`.
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Return a context that restores process settings after a trace and, if the trace fails,
        the Python state that `forward` can reach outside of the traced copy."""
        process = ProcessState()
        try:
            yield
        except BaseException:
            # A trace that succeeds leaves new entries of caches only (`filled`), which stay.
            self._at_first.restore()
            raise
        finally:
            process.restore()

    def check_settled(
        self,
        traced: torch.export.ExportedProgram,
        trace_again: Callable[[], torch.export.ExportedProgram],
    ) -> None:
        """Trace a second time if the first trace added objects to Python state that `forward` can
        reach.

        Args:
            traced: result of the first trace.
            trace_again: runs the second trace.

        Raises:
            CaptureError: if the added objects are not a cache: the second trace changes them again,
                or calls other operators than the first.
        """
        if not self._filled:
            return
        # Compared with the state after the first trace, in which a cache is full.
        self._is_second, self._reachable = True, ReachableState(self._module)
        # `torch.export` rebuilds objects in attributes whose classes are pytree nodes.
        for path, child in self._by_path.items():
            self._before[path] = _fingerprint_attributes(child)
        try:
            second = trace_again()
        except _SecondTraceEndedError:
            return
        except CaptureError:
            raise
        except Exception as error:
            raise self._make_state_change_error(self._filled[0]) from error
        # `code` is the generated Python: operators and arguments in order, without values of
        # tensors.
        if second.graph_module.code != traced.graph_module.code:
            raise self._make_state_change_error(self._filled[0])

    def _check_variables(self, values: KnownValues) -> None:
        for path, name in self.reads:
            variables = variables_at(self._by_path, path)
            if name in variables:
                before, after = self._before[path].get(name), content(variables[name])
                if before == after:
                    continue
                # Filled by the first call, like `problem_type` of a configuration of
                # `transformers`.
                if (names := replaced_none(before, after)) is not None:
                    where = f"{path}.{name}".removeprefix(".")
                    held = vars(variables[name])
                    self._record_filled_values(
                        {f"attribute '{where}.{n}'": held[n] for n in names}, values
                    )
                    continue
                # Only new entries in the first trace make a cache; the second one must add none.
                is_cache = path.startswith(GLOBALS) and only_adds_entries(before, after)
                if self._is_second or not is_cache or has_unknown_values(variables[name], values):
                    raise self._make_variable_change_error(path, name)
                where = f"global variable {{}} of {path.removeprefix(GLOBALS)}"
                self._filled.append(Change(StateLocation(where, name), variables[name], adds=True))
                # The second trace must find this state.
                self._before[path][name] = after
        # Changes that `__setattr__` does not see: through `__dict__`, or by `object.__setattr__`.
        for path, before_call in self._at_begin.items():
            attributes = vars(self._by_path[path])
            self._record_added_attributes(
                path, attributes.keys() - before_call.keys() - OF_TORCH, values
            )
            for name in before_call.keys() - OF_TORCH:
                value = attributes.get(name, MISSING)
                # None may be filled by the first call.
                if value is before_call[name] or before_call[name] is None:
                    continue
                unseen = (path, name) not in self.reads and (path, name) not in self.writes
                if name not in attributes or (
                    unseen and content(value) != self._before[path].get(name)
                ):
                    raise self._make_variable_change_error(path, name)

    def _record_added_attributes(
        self, path: str, names: Iterable[str], values: KnownValues
    ) -> None:
        """Record new attributes that `forward` set through `__dict__`, as `cached_property`
        does."""
        for name in sorted(names):
            if (path, name) in self.writes or (path, name) in self.reads:
                continue
            value = vars(self._by_path[path])[name]
            description = f"attribute {{}} of a {type(self._by_path[path]).__name__}"
            location = StateLocation(description, path).inside(name, indexed=False)
            if self._is_second or has_unknown_values(value, values):
                raise self._make_variable_change_error(path, name)
            self._filled.append(Change(location, value, adds=True))
            self._record_filled_values({str(location): value}, values)
            self._before[path][name] = content(value)

    def _record_filled_values(self, filled: Mapping[str, Any], values: KnownValues) -> None:
        for location, value in filled.items():
            # Concatenated: all new elements of a list have the location of the list.
            new_text = f"{self.filled.get(location, '')}{value_text(value, values)}"
            self.filled[location] = new_text

    def _check_arguments_and_hooks(self) -> None:
        if refusal := self._arguments.refusal(self._iterate_forward_codes):
            raise refusal
        for path, number in self._count_hooks().items():
            if number != self._hooks[path]:
                raise located(
                    self._iterate_forward_codes,
                    path,
                    f"`forward` registers a hook on {f'module {path!r}' if path else 'the model'}, "
                    "but a captured model would not register it again in each call\n"
                    "register the hook before `plan`",
                )

    def _count_hooks(self) -> dict[str, int]:
        return {path: count_hooks(child) for path, child in self._by_path.items()}

    def _check_reachable_state(self, values: KnownValues) -> None:
        def equal(first: Tensor, other: Tensor) -> bool:
            return are_equal_tensors(values.value_of(first), values.value_of(other))

        for change in self._reachable.changes(equal):
            if self._is_second or not change.adds or has_unknown_values(change.value, values):
                raise self._make_state_change_error(change)
            self._filled.append(change)
            self._record_filled_values({str(change.location): change.value}, values)
        # Where the first trace stored a computed tensor, the second reads it instead of computing
        # it, so the two graphs differ; that state is unchanged must do.
        if self._is_second and any(
            True for change in self._filled for _ in tensors_inside(change.value)
        ):
            raise _SecondTraceEndedError

    def _check_process_settings(self) -> None:
        names = {name for code in self._iterate_forward_codes for name in code.co_names}
        for changed in self._process.changes():
            name, readers = changed.setting.name, changed.setting.readers
            # The setting changes no operator (warning filters, log levels), and `forward` never
            # reads it.
            if readers and names.isdisjoint(readers):
                continue
            word = name.rpartition(".")[2]
            raise located(self._iterate_forward_codes, word, change_message(changed))

    def _make_state_change_error(self, change: Change) -> CaptureError:
        # The inner iterator of a cycle has a path such as `turns[1][0]`.
        location = change.location
        if change.advances:
            location = StateLocation(location.description, location.path.partition("[")[0])
        remedy = _REMEDY_OF_ITERATORS if change.advances else _REMEDY
        message = _format_change(f"{location}", remedy)
        return located(self._iterate_forward_codes, location.path, message)

    def _make_variable_change_error(self, path: str, name: str) -> CaptureError:
        if path.startswith(GLOBALS):
            what = f"global variable {name!r} of {path.removeprefix(GLOBALS)}"
        else:
            where = f"{path}.{name}" if path else name
            what = f"attribute {where!r} of a {type(self._by_path[path]).__name__}"
        # The line of the assignment itself is better than a guess from the code objects.
        if line := self._lines.get((path, name)):
            return LocatedError(f"{line}: {_format_change(what)}")
        return located(self._iterate_forward_codes, name, _format_change(what))

    @property
    def _iterate_forward_codes(self) -> Iterable[CodeType]:
        return self._reachable.codes

    @staticmethod
    def _is_module_member(module: nn.Module, name: str) -> bool:
        """Whether `name` is a method, property, parameter, buffer or submodule."""
        # The default "" is plain: a name that the class lacks is no member of it.
        if not isinstance(getattr(type(module), name, ""), (*PLAIN_TYPES, tuple)):
            return True
        tensors = (vars(module)[registry] for registry in ("_parameters", "_buffers", "_modules"))
        return any(name in named for named in tensors)


def _format_change(what: str, remedy: str = _REMEDY) -> str:
    return (
        f"`forward` changes the {what} for the next call, and a captured model would not: its "
        f"Python runs once, on the rank that captures\n{remedy}"
    )


def _fingerprint_attributes(module: nn.Module) -> dict[str, Hashable]:
    return {name: content(value) for name, value in vars(module).items() if name not in OF_TORCH}


def _is_user_code(frame: FrameType) -> bool:
    # `functools.cached_property` reads and sets its own entry only.
    libraries = ("torch.", "shardwright.", "functools")
    return not str(frame.f_globals.get("__name__")).startswith(libraries)
