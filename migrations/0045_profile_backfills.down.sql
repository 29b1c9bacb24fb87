set local lock_timeout = '500ms';

drop table profile_backfill_agents;
drop table profile_backfills;
