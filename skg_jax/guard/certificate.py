"""What a request may claim at its end: the steps certified, at which level, and everything that weakens the claim."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from skg_jax.guard.policy import Verdict

type Scope = Literal["request", "per_decision", "none"]

_ORDER: tuple[Scope, ...] = ("request", "per_decision", "none")  # from the strongest
_WHAT = {
    ("step", "mass"): "the weighted mean of the attention mass dropped",
    ("step", "output"): "the bound on the weighted mean relative change of the attention output",
    ("heads", "mass"): "the attention mass dropped by any one covered head",
    ("heads", "output"): "the bound on the relative change of the attention output of any one covered head",
}


class Attempt(NamedTuple):
    """One attempt at one token, on the host; see `decode.StepInfo`."""

    position: int
    token: int | None  # None: the attempt did not stand
    verdict: Verdict
    exact: bool
    bound: float
    cap: float
    units: int
    drawn: int
    audited: int
    selected: int
    total: int
    violated: bool
    unbounded: int
    key_reused: bool
    uncovered: bool
    corrupt: tuple[int, int] | None  # (layer, block)


class Terms(NamedTuple):
    """What was declared before the request ran."""

    attention: str
    alpha: float
    tau: float
    residual: str
    spending: str
    uncovered_heads: tuple[tuple[int, int], ...] = ()
    audit_scope: str = "step"
    dense_below: int = 0  # tokens


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Statement about one request. It concerns the attention residual and nothing else: no token, no task.

    Attributes:
      scope: "request": one error probability alpha for all steps together; "per_decision": each certified step holds
        at its own small error, no statement over the request; "none".
      reason: why the scope is not "request", or what else must be known; empty if nothing.
      steps: decode steps that stand (the first token comes from the exact prefill and is not a step).
      accepted: of these, sparse steps that the audit certified.
      expanded: attempts repeated with more pages.
      fallback: steps computed exactly.
      short: of these, steps over fewer tokens than the crossover `terms.dense_below`, where dense attention is faster.
      uncertified: steps released without either.
      worst_bound, mean_bound: of the residual over the steps that stand with a certificate, exact ones counting 0;
        None without any.
      terms: what was declared. bounds: of every certified step, in order; both for `quote`.
    """

    scope: Scope
    reason: str
    alpha: float
    tau: float
    residual: str
    steps: int
    accepted: int
    expanded: int
    fallback: int
    short: int
    uncertified: int
    worst_bound: float | None
    mean_bound: float | None
    terms: Terms = dataclasses.field(repr=False)
    bounds: tuple[float, ...] = dataclasses.field(repr=False, default=())

    def __str__(self) -> str:
        return " ".join(filter(None, (self.statement, self.crossover, self.reason and f"Note: {self.reason}")))

    @property
    def statement(self) -> str:
        """The claim in one sentence, no more than what holds."""
        if self.scope == "none":
            return "No guarantee is given for this request."
        if self.accepted == 0 and not self.uncertified:
            return f"Every step ({self.steps}) used exact attention."
        what = _WHAT[self.terms.audit_scope, self.residual]
        limit = f"{what} is at most {self.tau:g} against dense attention on the same cache and queries"
        if self.scope == "request":
            chance = f"With probability at least {1 - self.alpha:g} over the audit's draws"
            return f"{chance}, in every one of the {self.steps} steps {limit}."
        alone = f"In each of the {self.accepted} certified steps taken alone"
        return f"{alone}, {limit}, except with that step's own error probability."

    @property
    def crossover(self) -> str:
        """How many steps were exact for their short context, in one sentence; empty if none was."""
        if not self.short:
            return ""
        where = f"because their context was below {self.terms.dense_below:,} tokens"
        return f"Attention was exact in {self.short} of the {self.steps} steps {where}."

    def quote(self, tau: float | None = None, new_weights: bool = False) -> Certificate:
        """The same run read at another tau, chosen after looking.

        Under even spending every step's bound holds at once, so a tau at or above all of them keeps its scope. Under
        the ledger only the declared tau has a request-level proof. Head weights chosen after looking void everything.
        """
        if new_weights:
            return self._weaker("none", "the head weights were chosen after looking at the run")
        if tau is None or tau == self.tau:
            return self
        quoted = dataclasses.replace(self, tau=tau)
        above = sum(bound > tau for bound in self.bounds)
        if above:
            return quoted._weaker("none", f"{above} certified steps have a bound above {tau:g}")
        if self.terms.spending == "ledger":
            reason = "tau was chosen after looking, and the ledger proves only the declared one"
            return quoted._weaker("per_decision", reason)
        return quoted

    def to_json(self) -> dict:
        """The fields but for `terms` and `bounds`, what the audit limits ("step" or "heads"), and the statement."""
        hidden = ("terms", "bounds")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in hidden}
        terms = {"audit_scope": self.terms.audit_scope, "dense_below": self.terms.dense_below}
        return fields | terms | {"statement": self.statement}

    def _weaker(self, scope: Scope, reason: str) -> Certificate:
        reasons = "; ".join(filter(None, (self.reason, reason)))
        return dataclasses.replace(self, scope=_weakest((self.scope, scope)), reason=reasons)


def certify(terms: Terms, attempts: Sequence[Attempt]) -> Certificate:
    """Fold the attempts of a request into its certificate."""
    stood = [a for a in attempts if a.token is not None]
    guarded = terms.attention == "guarded"
    released = [a for a in stood if a.verdict == Verdict.RELEASE] if guarded else [a for a in stood if not a.exact]
    certified = [a for a in stood if a.verdict == Verdict.ACCEPT and (guarded or a.exact)]
    findings = list(_findings(terms, attempts, released))
    bounds = tuple(0.0 if a.exact else a.bound for a in certified)
    return Certificate(
        scope=_weakest(scope for scope, _ in findings),
        reason="; ".join(reason for _, reason in findings),
        alpha=terms.alpha,
        tau=terms.tau,
        residual=terms.residual,
        steps=len(stood),
        accepted=sum(not a.exact for a in certified),
        expanded=sum(a.verdict == Verdict.EXPAND for a in attempts) if guarded else 0,
        fallback=sum(a.exact for a in certified),
        short=sum(a.exact and a.position + 1 < terms.dense_below for a in certified),
        uncertified=len(released),
        worst_bound=max(bounds, default=None),
        mean_bound=sum(bounds) / len(bounds) if bounds else None,
        terms=terms,
        bounds=bounds,
    )


def _weakest(scopes: Iterable[Scope]) -> Scope:
    return _ORDER[max(map(_ORDER.index, scopes), default=0)]


def _findings(terms: Terms, attempts: Sequence[Attempt], released: Sequence[Attempt]) -> Iterator[tuple[Scope, str]]:
    """Everything that weakens the request's statement, with what remains (docs/guarantee.md, table of scopes)."""
    if terms.attention == "sparse" and released:
        yield "none", "attention was sparse without an audit"
        return
    for a in attempts:
        if a.corrupt is not None:
            layer, block = a.corrupt
            yield "none", f"the keys of block {block} in layer {layer} do not match their checksum"
    broken = [a.position for a in attempts if a.violated]
    if broken:
        where = f"a page's mass lay outside its bounds at position {broken[0]}"
        yield "none", f"{where}, so earlier steps relied on bad metadata too"
    reused = [a.position for a in attempts if a.key_reused]
    if reused:
        yield "none", f"the audit key of position {reused[0]} had been used before"
    beyond = sum(a.uncovered for a in attempts)
    if beyond:
        yield "per_decision", f"{beyond} attempts came after alpha was used up and stand alone at the same level"
    if released:
        stale = sum(a.unbounded > 0 for a in released)
        extra = f", {stale} of them with unread pages that have no valid bounds" if stale else ""
        what = f"{len(released)} steps were released although not certified{extra}"
        yield "per_decision", f"{what}; the others keep their statement"
    if terms.uncovered_heads:
        named = ", ".join(f"layer {layer} head {head}" for layer, head in terms.uncovered_heads[:4])
        more = "" if len(terms.uncovered_heads) <= 4 else f" and {len(terms.uncovered_heads) - 4} more"
        yield "request", f"{named}{more} not covered: their weight counts as lost in every bound"
