set local lock_timeout = '5s';

drop index awaits_due_idx;
