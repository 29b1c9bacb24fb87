set local lock_timeout = '500ms';

alter table agents drop constraint agents_published_fkey;
drop table agent_versions;
drop table agents;
