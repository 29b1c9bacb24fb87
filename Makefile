# `make run` on a fresh clone shows a delegation; ARGS are passed on: make run ARGS=--once
# The sources compile without a database: .sqlx/ holds what the SQL macros need (.ci/sqlx-data renews it).
export SQLX_OFFLINE := true

.PHONY: run test model-check chaos bench lint fmt

# A debug build: to the first answer of a fresh clone it takes about half the time of a release build.
run:
	@.ci/install run
	cargo build --locked
	@exec cargo run --locked --quiet -- dev $(ARGS)

# All tests, on a throw-away database: make test ARGS='embedded::'
test:
	@.ci/install test
	.ci/with-postgres cargo nextest run --locked $(ARGS)

# The waiting protocol under more faults than the tests explore; prints the numbers of states.
model-check:
	@.ci/install test
	RECONVENE_MODEL_DEEP=1 cargo nextest run --locked --no-capture -E 'test(/^model::/)'

# Ten minutes of killed processes, a killed database and cut connections, then rest, and nothing may be lost or twice.
# `make test` does it for a minute. RECONVENE_CHAOS_SECONDS is another time, RECONVENE_CHAOS_SEED repeats a run.
chaos:
	@.ci/install test
	RECONVENE_CHAOS_SECONDS=$${RECONVENE_CHAOS_SECONDS:-600} cargo nextest run --locked --no-capture -E 'test(/^chaos::/)'

bench:
	@.ci/install run
	cargo build --release --locked
	cargo bench --locked -- $(ARGS)

lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo deny --log-level error check licenses bans sources

fmt:
	cargo fmt
