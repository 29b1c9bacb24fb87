set local lock_timeout = '500ms';

drop index tasks_top_level_idx;
