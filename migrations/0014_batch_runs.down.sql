set local lock_timeout = '500ms';

alter table await_groups drop constraint await_groups_batch_fkey;
alter table tasks drop constraint tasks_batch_fkey;
drop table batch_runs;
