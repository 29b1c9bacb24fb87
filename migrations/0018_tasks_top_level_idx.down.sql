set local lock_timeout = '5s';

drop index tasks_top_level_idx;
