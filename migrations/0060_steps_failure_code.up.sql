set local lock_timeout = '500ms';

-- Of a failed step, as the task's error has it: siblings of a failed call end first, and then the task fails with this.
alter table steps add column failure_code text;
