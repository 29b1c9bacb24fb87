set local lock_timeout = '5s';

drop index signals_early_idx;
