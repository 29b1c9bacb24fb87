set local lock_timeout = '5s';

drop index steps_lease_idx;
