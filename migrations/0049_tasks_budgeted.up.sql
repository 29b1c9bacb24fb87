set local lock_timeout = '500ms';

-- This task, or one above it, has a budget: looked at before each model call, so that nobody else looks for one.
alter table tasks add column budgeted boolean not null default false;
