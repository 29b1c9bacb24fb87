set local lock_timeout = '5s';

drop index signals_pending_idx;
