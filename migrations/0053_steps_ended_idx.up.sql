set local lock_timeout = '500ms';

-- What the decide steps of a workspace have taken in some time: `GET /api/usage`.
create index if not exists steps_ended_idx on steps (workspace_id, finished_at)
    where ordinal = 0 and finished_at is not null;
